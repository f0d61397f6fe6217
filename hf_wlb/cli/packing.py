"""``hf-wlb analyze`` and ``hf-wlb tune``: packers on given data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_wlb.analysis import Analysis, LengthSource, analyze, choose_workload, read_lengths
from hf_wlb.analysis.tables import analysis_tables, tuning_tables
from hf_wlb.cli.base import (
    Checkpointing,
    Crossover,
    Hardware,
    Model,
    ProfileFile,
    app,
    check_folders,
    progress,
    user_errors,
    write_json,
)
from hf_wlb.lengths import IntArray
from hf_wlb.packing import PackingConfig, TuningPoint, TuningResult, tune
from hf_wlb.packing.tuning import Mapper
from hf_wlb.workload import WorkloadModel

Data = Annotated[
    str | None,
    typer.Argument(
        help="A file of lengths (.npy, a JSON list, a .csv of one column, or one a line); tokenised documents (rows "
        "with input_ids) or text: a .jsonl or .parquet file, a saved data set, a folder, a `datasets` name, a .txt "
        "file, or `stdlib`. Absent: the built-in sampler of lengths.",
        show_default=False,
    ),
]
Context = Annotated[int, typer.Option(help="Context length: tokens of a micro-batch on average.")]
MicroBatches = Annotated[int, typer.Option(help="Micro-batches per step on one data-parallel replica.")]
Dp = Annotated[int, typer.Option(help="Data-parallel replicas.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
Sharded = Annotated[bool, typer.Option("--sharded-parameters", help="FSDP or ZeRO-3 (without a pipeline).")]
SMax = Annotated[int | None, typer.Option(help="S_max: most tokens of a micro-batch that fit into memory.")]
Steps = Annotated[int, typer.Option(help="Steps' worth of documents to compare on.")]
TuneSteps = Annotated[int | None, typer.Option(help="Steps to simulate with each setting (default: 40 to 200).")]
MaxDelay = Annotated[float, typer.Option(help="Mean steps that a token may wait, for the recommendation.")]
Seed = Annotated[int, typer.Option(help="Of the order of the documents.")]
Tokenizer = Annotated[str | None, typer.Option(help="For text: name or folder of a tokenizer.")]
ColumnOfText = Annotated[str | None, typer.Option(help="For text: the column that holds it.")]
Split = Annotated[str, typer.Option(help="For text or tokenised documents: the split to read.")]
MaxDocuments = Annotated[int | None, typer.Option(help="Take only the first so many documents.", min=1)]
Workers = Annotated[int, typer.Option(help="Processes that try settings.", min=1)]


@app.command("analyze")
@user_errors
def analyze_command(
    data: Data = None,
    context: Context = 131_072,
    micro_batches: MicroBatches = 4,
    dp: Dp = 1,
    pp: Pp = 4,
    sharded_parameters: Sharded = False,
    s_max: SMax = None,
    model: Model = None,
    crossover: Crossover = None,
    profile: ProfileFile = None,
    hardware: Hardware = "h100",
    gradient_checkpointing: Checkpointing = False,
    steps: Steps = 200,
    max_delay: MaxDelay = 1.0,
    seed: Seed = 0,
    stored_order: Annotated[bool, typer.Option("--stored-order", help="Read documents as stored.")] = False,
    recommend: Annotated[bool, typer.Option(help="Search for recommended settings.")] = True,
    tune_steps: TuneSteps = None,
    solver_windows: Annotated[int, typer.Option(help="Steps' worth of documents for the solver.", min=0)] = 3,
    tokenizer: Tokenizer = None,
    text_column: ColumnOfText = None,
    split: Split = "train",
    max_documents: MaxDocuments = None,
    workers: Workers = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the packers' times; lengths go to *-lengths.png.")] = None,
) -> None:
    """Compare all packers on the same documents, and recommend settings."""
    check_folders(json_file, png)
    config = PackingConfig(context, micro_batches, dp, pp, sharded_parameters, max_tokens_per_micro_batch=s_max)
    workload, priced_by = choose_workload(
        model=model,
        crossover=crossover,
        profile=profile,
        hardware=hardware,
        gradient_checkpointing=gradient_checkpointing,
    )
    with progress("reading lengths") as show:
        source = _read(data, tokenizer, text_column, split, max_documents, seed)
        analysis = analyze(
            source.lengths,
            workload,
            config,
            steps=steps,
            seed=seed,
            stored_order=stored_order,
            solver_windows=solver_windows,
            tuner=_tuner(workload, config, max_delay, None, seed, workers, show, tune_steps) if recommend else None,
            progress=show,
        )
    console = Console()
    for part in analysis_tables(analysis, source.description, priced_by, config):
        console.print(part)
    if json_file is not None:
        write_json(json_file, {"source": source.description, "workload": priced_by, **analysis.to_dict()})
    if png is not None:
        _draw(analysis, png, context)


@app.command("tune")
@user_errors
def tune_command(
    data: Data = None,
    context: Context = 131_072,
    micro_batches: MicroBatches = 4,
    dp: Dp = 1,
    pp: Pp = 4,
    sharded_parameters: Sharded = False,
    s_max: SMax = None,
    model: Model = None,
    crossover: Crossover = None,
    profile: ProfileFile = None,
    hardware: Hardware = "h100",
    gradient_checkpointing: Checkpointing = False,
    steps: TuneSteps = None,
    max_delay: MaxDelay = 1.0,
    max_token_variation: Annotated[
        float | None, typer.Option(help="Most variation of the tokens per step that is acceptable.")
    ] = None,
    packer: Annotated[list[str] | None, typer.Option(help="wlb or steady; both by default.")] = None,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    text_column: ColumnOfText = None,
    split: Split = "train",
    max_documents: MaxDocuments = None,
    workers: Workers = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the recommended packing settings (PackingConfig.from_dict).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write every setting tried and its figures as JSON.")] = None,
) -> None:
    """Try settings on a simulated stream of your lengths, and recommend one."""
    check_folders(json_file, report)
    config = PackingConfig(context, micro_batches, dp, pp, sharded_parameters, max_tokens_per_micro_batch=s_max)
    workload, priced_by = choose_workload(
        model=model,
        crossover=crossover,
        profile=profile,
        hardware=hardware,
        gradient_checkpointing=gradient_checkpointing,
    )
    packers = tuple(packer or ("wlb", "steady"))
    with progress("reading lengths") as show:
        source = _read(data, tokenizer, text_column, split, max_documents, seed)
        search = _tuner(workload, config, max_delay, max_token_variation, seed, workers, show, steps, packers)
        result = search(source.lengths)
    console = Console()
    for part in tuning_tables(result, source.description, priced_by, config):
        console.print(part)
    if json_file is not None:
        write_json(json_file, result.recommended.config.to_dict())
    if report is not None:
        write_json(report, {"source": source.description, "workload": priced_by, **result.to_dict()})


def _read(
    data: str | None, tokenizer: str | None, column: str | None, split: str, most: int | None, seed: int
) -> LengthSource:
    return read_lengths(data, tokenizer=tokenizer, text_column=column, split=split, max_documents=most, seed=seed)


def _tuner(
    workload: WorkloadModel,
    config: PackingConfig,
    max_delay: float,
    max_token_variation: float | None,
    seed: int,
    workers: int,
    show: Callable[[str], None],
    steps: int | None = None,
    packers: tuple[str, ...] = ("wlb", "steady"),
) -> Callable[[Any], TuningResult]:
    def search(lengths: IntArray) -> TuningResult:
        with _mapper(workers) as mapper:
            return tune(
                lengths,
                workload,
                config,
                max_delay=max_delay,
                max_token_variation=max_token_variation,
                packers=packers,
                steps=steps,
                seed=seed,
                mapper=mapper,
                progress=lambda tried: show(f"trying settings ({tried} so far)"),
            )

    return search


@contextmanager
def _mapper(workers: int) -> Iterator[Mapper]:
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers) as pool:

        def parallel(function: Callable[[PackingConfig], TuningPoint], items: Any) -> Iterator[TuningPoint]:
            return pool.map(function, items)

        yield parallel


def _draw(analysis: Analysis, path: Path, context_length: int) -> None:
    from hf_wlb.plots import plot_length_histogram, plot_packer_bars

    plot_length_histogram(analysis.summary, path.with_name(f"{path.stem}-lengths.png"), context_length=context_length)
    plot_packer_bars(analysis.bars(), path)
