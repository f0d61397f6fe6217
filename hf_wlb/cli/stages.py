"""``hf-wlb stages``: a model's layers over pipeline stages, by counted or by measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_wlb.analysis.inputs import model_config
from hf_wlb.analysis.sharding import read_micro_batch
from hf_wlb.analysis.stage_tables import stage_tables
from hf_wlb.analysis.stages import analyze_stages
from hf_wlb.cli.base import (
    Checkpointing,
    Model,
    app,
    check_folders,
    measuring_device,
    progress,
    user_errors,
    write_json,
)
from hf_wlb.lengths import LengthArray
from hf_wlb.staging import StageCosts, stage_costs, typical_lengths
from hf_wlb.workload.hardware import HARDWARE_PRESETS

_DEFAULT_HARDWARE = "h100"

CostsFile = Annotated[Path | None, typer.Option(help="Costs of an earlier --json or of your own, instead of --model.")]
Context = Annotated[int, typer.Option(help="Tokens of a micro-batch; without --lengths, of four equal documents.")]
Lengths = Annotated[
    str | None,
    typer.Option(
        help="Tokens of the micro-batch's documents, such as 90000,12000,800; or a file of lengths (.npy, a JSON list, "
        "or one a line) to draw them from.",
        show_default=False,
    ),
]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
MicroBatches = Annotated[
    int | None, typer.Option(help="Micro-batches per step on one replica; default: four times --pp.", min=1)
]
Layers = Annotated[str | None, typer.Option(help="An own cut to compare: layers of every stage, such as 8,9,9,6.")]
Hardware = Annotated[
    str | None, typer.Option(help=f"Count costs for {', '.join(HARDWARE_PRESETS)}; default: {_DEFAULT_HARDWARE}.")
]
Measure = Annotated[bool, typer.Option("--measure", help="Time the model's parts on this machine instead.")]
Device = Annotated[str | None, typer.Option(help="With --measure: cuda or cpu; default: a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="With --measure: bfloat16 (default), float16 or float32.")]
Repeats = Annotated[int | None, typer.Option(help="With --measure: how often, the median counts (default: 5).", min=1)]
Seed = Annotated[int, typer.Option(help="Of the drawing from a file of lengths.")]


@app.command("stages")
@user_errors
def stages_command(
    model: Model = None,
    costs: CostsFile = None,
    context: Context = 131_072,
    lengths: Lengths = None,
    pp: Pp = 4,
    micro_batches: MicroBatches = None,
    layers: Layers = None,
    hardware: Hardware = None,
    measure: Measure = False,
    device: Device = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    gradient_checkpointing: Checkpointing = False,
    seed: Seed = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write costs and layouts as JSON, for pp_stage_costs and --costs.")
    ] = None,
) -> None:
    """Cut a model into pipeline stages of equal cost, embedding, head and loss included."""
    check_folders(json_file)
    own = None if layers is None else _layers(layers)
    if (model is None) == (costs is None):
        raise ValueError(
            "Give either --model, whose costs are counted or measured, or --costs, a file that holds them."
        )
    if costs is not None and (measure or hardware is not None):
        raise ValueError("--costs says what the parts cost; leave --measure and --hardware out.")
    if measure and hardware is not None:
        raise ValueError("--hardware counts costs and --measure times them; give one of them.")
    if not measure and (device, dtype, repeats) != (None, None, None):
        raise ValueError("--device, --dtype and --repeats say how to measure; give --measure, too.")
    if costs is not None:
        found = StageCosts.load(costs)
    else:
        assert model is not None
        documents = typical_lengths(context) if lengths is None else read_micro_batch(lengths, context, seed).lengths
        config, checkpointing = model_config(model), gradient_checkpointing
        if measure:
            found = _measure(config, documents, device, dtype or "bfloat16", repeats or 5, checkpointing)
        else:
            figures = hardware or _DEFAULT_HARDWARE
            found = stage_costs(config, documents, hardware=figures, gradient_checkpointing=checkpointing)
    steps = 4 * pp if micro_batches is None else micro_batches
    analysis = analyze_stages(found, pp, steps, given=own, gradient_checkpointing=gradient_checkpointing)
    console = Console()
    for part in stage_tables(analysis):
        console.print(part)
    if json_file is not None:
        write_json(json_file, analysis.to_dict())


def _layers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    bad = next((word for word in words if not word.isdecimal()), None)
    if bad is not None:
        raise ValueError(f"--layers must be one whole number a stage, separated by commas; {bad!r} is not.")
    return [int(word) for word in words]


def _measure(
    config: Any,
    documents: Sequence[int] | LengthArray,
    device: str | None,
    dtype: str,
    repeats: int,
    checkpointing: bool,
) -> StageCosts:
    from hf_wlb.profiling import measure_stage_costs

    where, known = measuring_device(device, dtype)
    with progress("making the model") as show:
        return measure_stage_costs(
            config,
            documents,
            device=where,
            dtype=known,
            gradient_checkpointing=checkpointing,
            repeats=repeats,
            tell=show,
        )
