"""``hf-wlb plan``: how to train a model on so many GPUs with given documents, and the files that start it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hf_wlb.analysis.inputs import STANDARD_LIBRARY, LengthSource, longer_documents
from hf_wlb.analysis.launch_files import OWN_DOCUMENTS, RunFiles, check_free, from_anywhere
from hf_wlb.analysis.plan_tables import plan_tables
from hf_wlb.cli.base import ProfileFile, app, check_folders, progress, user_errors, write_json
from hf_wlb.cli.cluster import chosen_cluster, measured_profile, preset_name, shape_or_config
from hf_wlb.cli.text import ColumnOfText, Data, MaxDocuments, TextOptions, TextSplit, Tokenizer
from hf_wlb.simulator.cluster import CLUSTERS, Cluster
from hf_wlb.simulator.plan_result import PlanResult, Prediction
from hf_wlb.simulator.planner import QUICK, search

Model = Annotated[str, typer.Option(help="Preset (550M, 1B, 7B, 30B, 70B) or folder of a Transformers config.")]
Gpus = Annotated[int, typer.Option(help="GPUs to train on, all of them.", min=1)]
Context = Annotated[int, typer.Option(help="Context length: tokens of a micro-batch on average.")]
ClusterName = Annotated[str, typer.Option("--cluster", help=f"What GPUs and links do: {', '.join(CLUSTERS)}.")]
GpusPerNode = Annotated[int | None, typer.Option(help="GPUs that NVLink connects; default: the cluster's.", min=1)]
MemoryGb = Annotated[
    float | None, typer.Option(help="Memory of a GPU in GB, of which a tenth stays free; default: the cluster's.")
]
MicroBatches = Annotated[
    int | None,
    typer.Option(help="Micro-batches of a step on all replicas; default: 4M tokens, one for 128 GPUs at least.", min=1),
]
Keep = Annotated[int, typer.Option(help="So many of the best ways.", min=1)]
Quick = Annotated[bool, typer.Option("--quick", help="Few splits and few steps, to try it out: says little.")]
Output = Annotated[Path, typer.Option(help="Folder for launch.yaml, train.yaml and workload.json.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace such files that are there.")]
Seed = Annotated[int, typer.Option(help="Of the order of the documents.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")]
Png = Annotated[Path | None, typer.Option(help="Draw all ways to train.")]


@app.command("plan")
@user_errors
def plan_command(
    model: Model,
    gpus: Gpus,
    context: Context = 131_072,
    data: Data = None,
    cluster: ClusterName = "h100",
    gpus_per_node: GpusPerNode = None,
    memory_gb: MemoryGb = None,
    micro_batches: MicroBatches = None,
    profile: ProfileFile = None,
    keep: Keep = 5,
    quick: Quick = False,
    output: Output = Path("plan"),
    overwrite: Overwrite = False,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    text_column: ColumnOfText = None,
    text_split: TextSplit = "train",
    max_documents: MaxDocuments = None,
    json_file: Json = None,
    png: Png = None,
) -> None:
    """Search for the fastest way to train, and write what starts it."""
    check_folders(json_file, png)
    check_free(output, overwrite)
    where = chosen_cluster(cluster, gpus_per_node, memory_gb)
    measured = None if profile is None else measured_profile(profile)
    text = TextOptions(tokenizer, text_column, text_split, max_documents)
    with progress("reading lengths") as show:
        config = shape_or_config(model)
        source = text.read(data, seed)
        result = search(
            config,
            gpus,
            source.lengths,
            context,
            where,
            micro_batches=micro_batches,
            profile=measured,
            keep=keep,
            effort=QUICK if quick else None,
            seed=seed,
            progress=show,
        )
    preset, console = preset_name(model), Console()
    named = preset or Path(model).name
    longer = longer_documents(source.lengths, context)
    for part in plan_tables(result, named, f"{source.description}; {longer}", _priced_by(where, profile)):
        console.print(part)
    given = {"--model": model, "--gpus": gpus, "--context": context, "--data": data, "--cluster": cluster}
    given |= {"--gpus-per-node": gpus_per_node, "--memory-gb": memory_gb, "--micro-batches": micro_batches}
    given |= {"--profile": profile, "--seed": seed or None}
    files = RunFiles(
        result.best,
        model=preset or from_anywhere(model),
        vocab_size=config.vocab_size if preset and tokenizer is None else None,
        gpus_per_node=where.gpus_per_node,
        made_by=_said(given) + (" --quick" if quick else ""),
        documents=_to_train_on(data, source),
        text=text._replace(tokenizer=tokenizer and from_anywhere(tokenizer)).arguments(),
    )
    _say_how_to_run(console, files, output, files.write(output, overwrite=overwrite))
    if json_file is not None:
        about = {"source": source.description, "longer_documents": asdict(longer)}
        write_json(json_file, {**about, "cluster": asdict(where), **result.to_dict()})
    if png is not None:
        _draw(result, png, f"{named} on {gpus:,} GPUs, context {context:,}")


def _priced_by(cluster: Cluster, profile: str | None) -> str:
    measured = "" if profile is None else f", profile {Path(profile).name}"
    return f"{cluster.name}, {cluster.gpus_per_node} GPUs a node{measured}"


def _to_train_on(data: str | None, source: LengthSource) -> str:
    """The documents that were planned for; a place to fill in where there were none that can be trained on."""
    if data is None or data == STANDARD_LIBRARY or not source.has_documents:
        return OWN_DOCUMENTS
    return from_anywhere(data)


def _said(options: dict[str, Any]) -> str:
    """The command that was given, without where it writes to."""
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return shlex.join(["hf-wlb", "plan", *words])


def _say_how_to_run(console: Console, files: RunFiles, folder: Path, written: Sequence[Path]) -> None:
    console.print(Text(f"Written: {', '.join(str(path) for path in written)}"), soft_wrap=True)
    commands = files.commands(folder)
    if files.nodes == 1:
        console.print("Run, from the folder that holds recipes/:")
    else:
        console.print(
            f"Run on every one of {files.nodes:,} machines, with its own --machine_rank (the first and the last):"
        )
    for command in commands:
        console.print(Text(f"  {command}", "cyan"), soft_wrap=True)
    console.print("Or under Slurm:")
    console.print(Text(f"  {files.slurm_command(folder)}", "cyan"), soft_wrap=True)


def _draw(result: PlanResult, path: Path, title: str) -> None:
    from hf_wlb.plots import PlanPoint, plot_plan

    def point(found: Prediction) -> PlanPoint:
        return PlanPoint(found.memory_bytes / 1e9, found.tokens_per_second, found.training.label)

    plot_plan(
        [PlanPoint(found.memory_bytes / 1e9, found.tokens_per_second, found.label) for found in result.points],
        [(point(choice.prediction), point(choice.plain)) for choice in result.choices],
        point(result.plain),
        path,
        limit_gb=result.memory_limit / 1e9,
        title=title,
    )
