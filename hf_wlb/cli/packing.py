"""``hf-wlb analyze`` and ``hf-wlb tune``: packers on given data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_wlb.analysis import (
    Analysis,
    CaseResult,
    LengthSource,
    analyze,
    choose_workload,
    read_lengths,
    recommend,
)
from hf_wlb.analysis.recommendation import NO_RECOMMENDATION
from hf_wlb.analysis.tables import analysis_tables, arguments_lines, recommendation_tables, tuning_tables
from hf_wlb.argument_names import as_arguments
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
from hf_wlb.packing.config import DEFAULT_MEMORY_FACTOR
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
TuneSteps = Annotated[int | None, typer.Option(min=1, help="Steps to simulate with each setting (default: 40 to 200).")]
MaxDocumentTokens = Annotated[
    int | None, typer.Option(help="Longest document left whole; longer ones are split. Default: the context length.")
]
YamlFile = Annotated[
    Path | None,
    typer.Option("--yaml", help="Write the recommended settings, else the defaults, as a recipe's YAML."),
]
MaxDelay = Annotated[float, typer.Option(min=0.0, help="Mean steps that a token may wait, for the recommendation.")]
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
    recommend_settings: Annotated[
        bool, typer.Option("--recommend/--no-recommend", help="Search for recommended settings.")
    ] = True,
    tune_steps: TuneSteps = None,
    solver_windows: Annotated[int, typer.Option(help="Steps' worth of documents for the solver.", min=0)] = 3,
    tokenizer: Tokenizer = None,
    text_column: ColumnOfText = None,
    split: Split = "train",
    max_documents: MaxDocuments = None,
    workers: Workers = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    yaml: YamlFile = None,
    png: Annotated[Path | None, typer.Option(help="Draw the packers' times; lengths go to *-lengths.png.")] = None,
) -> None:
    """Compare all packers on the same documents, and recommend settings."""
    check_folders(json_file, yaml, png)
    config = _layout(context, micro_batches, dp, pp, sharded_parameters, s_max)
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
            *(source.lengths, workload, config),
            steps=steps,
            seed=seed,
            stored_order=stored_order,
            solver_windows=solver_windows,
            progress=show,
        )
    console = Console()
    for part in analysis_tables(analysis, source.description, priced_by, config):
        console.print(part)
    with progress("searching settings") as show:
        search = _tuner(workload, config, max_delay, None, seed, workers, show, tune_steps)
        found = recommend(analysis, workload, search) if recommend_settings else None
    for part in recommendation_tables(analysis, found, config):
        console.print(part)
    best = analysis.result("steady") if found is None else found.result
    _write_yaml(yaml, best.config)
    if json_file is not None:
        advice = {**(NO_RECOMMENDATION if found is None else found.to_dict()), "arguments": as_arguments(best.config)}
        write_json(json_file, {**_told(source, priced_by), **analysis.to_dict(best), **advice})
    if png is not None:
        _draw(analysis, best, png, context)


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
    max_document_tokens: MaxDocumentTokens = None,
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
    yaml: YamlFile = None,
    report: Annotated[Path | None, typer.Option(help="Write every setting tried and its figures as JSON.")] = None,
) -> None:
    """Try settings on a simulated stream of your lengths, and recommend one."""
    check_folders(json_file, yaml, report)
    config = _layout(context, micro_batches, dp, pp, sharded_parameters, s_max, max_document_tokens)
    if not config.balances:
        raise ValueError(
            f"there is nothing to tune for --dp {dp}, --pp {pp} and --micro-batches {micro_batches}: a step takes as "
            "long whichever documents train together. Give the layout that you will train with."
        )
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
    longer = int((source.lengths > (config.longest_document or context)).sum())
    for part in tuning_tables(result, source.description, priced_by, config, longer):
        console.print(part)
    _write_yaml(yaml, result.recommended.config)
    if json_file is not None:
        write_json(json_file, result.recommended.config.to_dict())
    if report is not None:
        write_json(report, {**_told(source, priced_by), **result.to_dict()})


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


def _draw(analysis: Analysis, best: CaseResult, path: Path, context_length: int) -> None:
    from hf_wlb.plots import plot_length_histogram, plot_packer_bars

    lengths = path.with_name(f"{path.stem}-lengths.png")
    plot_length_histogram(analysis.summary, lengths, context_length=context_length)
    plot_packer_bars(analysis.bars(*(() if best in analysis.results else (best,))), path)


def _layout(
    context: int, micro_batches: int, dp: int, pp: int, sharded: bool, s_max: int | None, longest: int | None = None
) -> PackingConfig:
    """Documents above the context length are split there, unless something else is asked for: equal work for all."""
    most = s_max or int(DEFAULT_MEMORY_FACTOR * context)
    if longest is not None and context <= most < longest:
        raise ValueError(
            f"--max-document-tokens {longest:,} does not fit into a micro-batch of at most {most:,} tokens (--s-max, "
            f"by default {DEFAULT_MEMORY_FACTOR} x --context). Raise --s-max, or lower --max-document-tokens."
        )
    return PackingConfig(
        context,
        micro_batches,
        dp,
        pp,
        sharded,
        max_tokens_per_micro_batch=s_max,
        max_document_tokens=min(context, most) if longest is None else longest,
    )


def _told(source: LengthSource, priced_by: str) -> dict[str, Any]:
    return {"source": source.description, "workload": priced_by}


def _write_yaml(file: Path | None, config: PackingConfig) -> None:
    if file is not None:
        file.write_text("".join(f"{line}\n" for line in arguments_lines(config)), encoding="utf-8")
