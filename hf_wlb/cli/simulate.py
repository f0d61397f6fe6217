"""``hf-wlb simulate``: ways of training side by side on a cluster that need not be there; the paper's evaluation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from hf_wlb.analysis.environment import shown_command
from hf_wlb.analysis.inputs import LongerDocuments, longer_documents
from hf_wlb.analysis.simulation import FILE, FULL, QUICK, reproduce
from hf_wlb.analysis.simulation_pictures import draw_all
from hf_wlb.analysis.simulation_tables import column_legend, paper_tables, system_table
from hf_wlb.cli.base import ProfileFile, app, check_folders, progress, user_errors, write_json
from hf_wlb.cli.cluster import chosen_cluster, measured_profile, preset_name, shape_or_config
from hf_wlb.cli.text import ColumnOfText, Data, MaxDocuments, TextOptions, TextSplit, Tokenizer
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.comparison import BASELINE, Comparison, compare, model_that_fits, typical_timelines
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.schedules import SCHEDULES, ScheduleConfig
from hf_wlb.simulator.split import Split
from hf_wlb.simulator.stream import documents_for
from hf_wlb.simulator.systems import SYSTEMS
from hf_wlb.simulator.timeline import to_trace

ModelName = Annotated[
    str | None, typer.Option(help="Preset (550M, 1B, 7B, 30B, 70B) or folder of a Transformers config.")
]
Tp = Annotated[int, typer.Option(help="Tensor-parallel ranks.")]
Cp = Annotated[int, typer.Option(help="Context-parallel ranks.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
Dp = Annotated[int, typer.Option(help="Data-parallel replicas.")]
Fsdp = Annotated[bool, typer.Option("--fsdp", help="Replicas and context-parallel ranks share parameters out.")]
Context = Annotated[int, typer.Option(help="Context length: tokens of a micro-batch on average.")]
MicroBatches = Annotated[int | None, typer.Option(help="Of a step on one replica; default: --pp, as in the paper.")]
SMax = Annotated[int | None, typer.Option(help="S_max: most tokens of a micro-batch; default: 1.25 contexts.")]
SystemNames = Annotated[
    list[str] | None, typer.Option("--system", help=f"Only these, and plain-4d: {'; '.join(SYSTEMS)}.")
]
Schedule = Annotated[str, typer.Option(help=f"Of the pipeline: {', '.join(SCHEDULES)}.")]
_MODEL_CHUNKS, _PIECES = 2, 4
ModelChunks = Annotated[
    int | None, typer.Option(help=f"Of a stage, with --schedule interleaved; default: {_MODEL_CHUNKS}.")
]
Pieces = Annotated[int | None, typer.Option(help=f"Of a micro-batch, with --schedule seq1f1b; default: {_PIECES}.")]
ClusterName = Annotated[str, typer.Option("--cluster", help=f"What GPUs and links do: {', '.join(CLUSTERS)}.")]
GpusPerNode = Annotated[int | None, typer.Option(help="GPUs that NVLink connects; default: the cluster's.", min=1)]
Recompute = Annotated[
    bool | None,
    typer.Option(
        "--gradient-checkpointing/--no-gradient-checkpointing", help="Default: where it does not fit without."
    ),
]
Steps = Annotated[int, typer.Option(help="Steps' worth of documents.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the order of the documents.")]
Png = Annotated[Path | None, typer.Option(help="Draw every system's pipeline in a step of median speed.")]
Trace = Annotated[Path | None, typer.Option(help="Write these pipelines for Perfetto or chrome://tracing.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")]
Paper = Annotated[bool, typer.Option("--paper", help="Simulate the paper's evaluation instead: no --model, no split.")]
FlatData = Annotated[str | None, typer.Option(help="With --paper: lengths with a lighter tail, as --data.")]
Output = Annotated[Path | None, typer.Option(help=f"With --paper: folder for {FILE} and pictures.")]
Quick = Annotated[bool, typer.Option("--quick", help="With --paper: a few steps of two configurations, no figures.")]
Measured = Annotated[
    list[Path] | None, typer.Option(help="With --paper: results of the end-to-end benchmark to predict.")
]

#: Parameters that only ``--paper`` has, and those that both ways share.
_PAPER_ONLY = frozenset({"flat_data", "output", "quick", "measured"})
_SHARED = frozenset({"paper", "data", "seed"})


@app.command("simulate")
@user_errors
def simulate_command(
    given: typer.Context,
    model: ModelName = None,
    tp: Tp = 1,
    cp: Cp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    fsdp: Fsdp = False,
    context: Context = 131_072,
    micro_batches: MicroBatches = None,
    s_max: SMax = None,
    system: SystemNames = None,
    schedule: Schedule = "1f1b",
    model_chunks: ModelChunks = None,
    pieces: Pieces = None,
    cluster: ClusterName = "h100",
    gpus_per_node: GpusPerNode = None,
    gradient_checkpointing: Recompute = None,
    profile: ProfileFile = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    text_column: ColumnOfText = None,
    text_split: TextSplit = "train",
    max_documents: MaxDocuments = None,
    steps: Steps = 60,
    seed: Seed = 0,
    png: Png = None,
    trace: Trace = None,
    json_file: Json = None,
    paper: Paper = False,
    flat_data: FlatData = None,
    output: Output = None,
    quick: Quick = False,
    measured: Measured = None,
) -> None:
    """Predict what a step takes on a cluster under several ways of training, on the same documents."""
    _check_given(given, paper)
    if paper:
        _simulate_paper(data, flat_data, output, quick, measured, seed)
        return
    if model is None:
        raise ValueError("Give --model, a preset or the folder of a configuration; or --paper for the paper's models.")
    check_folders(png, trace, json_file)
    text = TextOptions(tokenizer, text_column, text_split, max_documents)
    text.check_used(data)
    order = _schedule(schedule, model_chunks, pieces)
    names = _systems(system)
    priced_by = model_that_fits(
        shape_or_config(model),
        Split(tp, cp, pp, dp, fsdp),
        chosen_cluster(cluster, gpus_per_node),
        context_length=context,
        gradient_checkpointing=gradient_checkpointing,
        profile=None if profile is None else measured_profile(profile),
    )
    size = pp if micro_batches is None else micro_batches
    found, documents = _compare(priced_by, names, size, order, s_max, (text, data), steps, seed)
    heading = _heading(found, preset_name(model) or Path(model).name, size, order)
    _show(found, documents, heading)
    if json_file is not None:
        write_json(json_file, _as_json(found, documents, heading))
    _draw(found, order, heading, png, trace)


def _check_given(given: typer.Context, paper: bool) -> None:
    """Refuses what would be ignored."""
    typed = {
        name
        for name in given.params
        if (source := given.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    wrong = typed - _PAPER_ONLY - _SHARED if paper else typed & _PAPER_ONLY
    if wrong:
        options = {parameter.name: parameter.opts[0] for parameter in given.command.params}
        shown = ", ".join(sorted(options[name] for name in wrong))
        taken = ", ".join(sorted(options[name] for name in _PAPER_ONLY | _SHARED - {"paper"}))
        raise ValueError(
            f"{shown} cannot be given with --paper, to which {'it does' if len(wrong) == 1 else 'they do'} not apply; "
            f"it takes only {taken}."
            if paper
            else f"{shown} can be given with --paper only."
        )


def _schedule(name: str, model_chunks: int | None, pieces: int | None) -> ScheduleConfig:
    for option, value, owner in (("--model-chunks", model_chunks, "interleaved"), ("--pieces", pieces, "seq1f1b")):
        if value is not None and name != owner:
            raise ValueError(f"{option} is for --schedule {owner}, but the schedule is {name}.")
    return ScheduleConfig(
        name,
        model_chunks=(_MODEL_CHUNKS if model_chunks is None else model_chunks) if name == "interleaved" else 1,
        pieces=(_PIECES if pieces is None else pieces) if name == "seq1f1b" else 1,
    )


def _systems(names: Sequence[str] | None) -> list[str]:
    """Those asked for, the baseline first in any case."""
    unknown = sorted(set(names or ()) - set(SYSTEMS))
    if unknown:
        raise ValueError(f"There is no system {'; '.join(unknown)}: --system is one of {'; '.join(SYSTEMS)}.")
    return list(dict.fromkeys([BASELINE, *(names or SYSTEMS)]))


class _Documents(NamedTuple):
    """What was simulated."""

    source: str
    longer: LongerDocuments


def _compare(
    model: StepModel,
    names: Sequence[str],
    micro_batches: int,
    schedule: ScheduleConfig,
    s_max: int | None,
    given: tuple[TextOptions, str | None],
    steps: int,
    seed: int,
) -> tuple[Comparison, _Documents]:
    """What the systems make of the documents, and where these are from."""
    with progress("reading lengths") as show:
        text, data = given
        source = text.read(data, seed)
        context, size = model.context_length, micro_batches * model.split.dp_size
        documents = documents_for(source.lengths, steps, context_length=context, micro_batches=size, seed=seed)
        found = compare(
            documents,
            [SYSTEMS[name] for name in names],
            model,
            micro_batches_per_replica=micro_batches,
            schedule=schedule,
            max_tokens_per_micro_batch=s_max,
            tell=show,
        )
    return found, _Documents(source.description, longer_documents(documents, context, drawn_from=source.lengths))


def _heading(found: Comparison, model: str, micro_batches: int, schedule: ScheduleConfig) -> str:
    split, priced_by = found.model.split, found.model
    cut = {"interleaved": f", {schedule.model_chunks} model chunks", "seq1f1b": f", {schedule.pieces} pieces"}
    checkpointing = "with" if priced_by.gradient_checkpointing else "without"
    return (
        f"{model}, context {priced_by.context_length:,}, {split.label} on {split.gpus:,} GPUs ({priced_by.cluster.name}"
        f"{', measured profile' if priced_by.profile is not None else ''}), {micro_batches} micro-batches a replica, "
        f"{schedule.name}{cut.get(schedule.name, '')}, {checkpointing} gradient checkpointing"
    )


def _show(found: Comparison, documents: _Documents, heading: str) -> None:
    console = Console()
    console.print(Text(f"Lengths: {documents.source}"))
    console.print(Text(f"Documents: {documents.longer}"))
    console.print(Text(f"Simulated: {heading}"))
    crossover = found.model.workload.crossover_length
    console.print(Text(f"Attention = linear work at {crossover:,.0f} tokens"))
    console.print(system_table(found.figures(), "Systems, the same documents for all"))
    console.print(column_legend())
    room = found.model.cluster.memory_bytes / 1e9
    for name, row in found.figures().items():
        if row["memory_gb"] > room:
            console.print(
                Text(
                    f"Note: {name} needs {row['memory_gb']:.0f} GB of a GPU's {room:.0f} GB, so it cannot run.",
                    "yellow",
                )
            )


def _as_json(found: Comparison, documents: _Documents, heading: str) -> dict[str, Any]:
    return {
        "schema": "hf_wlb.simulation/1",
        "source": documents.source,
        "longer_documents": asdict(documents.longer),
        "simulated": heading,
        "split": asdict(found.model.split),
        "stages": list(found.model.layout.sizes),
        "cluster": asdict(found.model.cluster),
        "gradient_checkpointing": found.model.gradient_checkpointing,
        "systems": {
            name: {**row, "each_step_seconds": list(found.results[name].step_seconds)}
            for name, row in found.figures().items()
        },
    }


def _draw(found: Comparison, schedule: ScheduleConfig, heading: str, png: Path | None, trace: Path | None) -> None:
    if png is None and trace is None:
        return
    timelines = typical_timelines(found, schedule)
    if png is not None:
        from hf_wlb.plots.timeline import plot_timelines

        plot_timelines(timelines, png, heading.split(", context")[0] + ": a step of median speed under every system")
    if trace is not None:
        write_json(trace, to_trace(timelines))


def _simulate_paper(
    data: str | None,
    flat_data: str | None,
    output: Path | None,
    quick: bool,
    measured: Sequence[Path] | None,
    seed: int,
) -> None:
    if output is not None and output.exists() and not output.is_dir():
        raise NotADirectoryError(f"--output {output} is a file; name a folder.")
    with progress("reading lengths") as show:
        found = reproduce(
            data,
            flat_data,
            extent=QUICK if quick else FULL,
            seed=seed,
            measured=measured,
            command=shown_command("hf-wlb", sys.argv[1:]),
            tell=show,
        )
    console = Console()
    console = Console(width=max(console.width, 150)) if not console.is_terminal else console
    for part in paper_tables(found):
        console.print(part)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / FILE, found)
        draw_all(found, output)
    typer.echo("RESULT " + json.dumps(found["result"]))
