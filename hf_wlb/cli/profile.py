"""``hf-wlb profile``: what attention, all other work and the links between devices cost here, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_wlb.analysis.inputs import model_config
from hf_wlb.analysis.profile_tables import profile_tables
from hf_wlb.cli.base import app, check_folders, errors, measuring_device, progress, user_errors, write_json
from hf_wlb.workload import ProfiledWorkload

if TYPE_CHECKING:
    from hf_wlb.profiling import ProfileOptions

Model = Annotated[
    str, typer.Option(help="Preset (550M, 1B, 7B, 30B, 70B) or folder of a Transformers config.", show_default=False)
]
Tp = Annotated[int, typer.Option(help="Ranks that share every matrix; start as many processes, or a multiple.", min=1)]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Kernel = Annotated[str | None, typer.Option(help="Attention kernel; default: the one that training would choose.")]
Longest = Annotated[int, typer.Option(help="Tokens of the longest document.", min=64)]
Seconds = Annotated[float, typer.Option(help="Time to take, about; what is measured goes by it.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few and short shapes, to try it out: says little.")]
Recompute = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Have the profile read as for layers that run forward twice.")
]
Compiled = Annotated[
    bool, typer.Option("--torch-compile", help="Measure compiled layers, for training with torch_compile.")
]
Seed = Annotated[int, typer.Option(help="Of the shapes that are measured to compare with.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the profile, for --profile and workload_profile.")]
Png = Annotated[Path | None, typer.Option("--png", help="Draw how fast attention is.")]


@app.command("profile")
@user_errors
def profile_command(
    model: Model,
    tp: Tp = 1,
    device: Device = None,
    dtype: Dtype = "bfloat16",
    kernel: Kernel = None,
    longest: Longest = 131_072,
    seconds: Seconds = 150.0,
    quick: Quick = False,
    gradient_checkpointing: Recompute = False,
    torch_compile: Compiled = False,
    seed: Seed = 0,
    json_file: Json = None,
    png: Png = None,
) -> None:
    """Measure what attention, all other work and, under torchrun, communication cost on the devices at hand."""
    check_folders(json_file, png)
    if not seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {seconds:g}.")
    config = model_config(model)
    where, known = measuring_device(device, dtype)
    from hf_wlb.profiling import ProfileOptions

    options = ProfileOptions(
        seconds=seconds,
        longest=longest,
        tp_size=tp,
        dtype=known,
        kernel=kernel,
        quick=quick,
        seed=seed,
        gradient_checkpointing=gradient_checkpointing,
        compiled=torch_compile,
    )
    found = _measure(config, where, options)
    if found is None:
        return
    workload = ProfiledWorkload.from_dict(found)
    console = Console()
    for part in profile_tables(workload):
        console.print(part)
    if json_file is not None:
        write_json(json_file, found)
    if png is not None:
        from hf_wlb.plots import plot_attention_rates

        plot_attention_rates(workload.profile, png)


def _measure(config: Any, device_type: str, options: ProfileOptions) -> dict[str, Any] | None:
    """The profile; None on other processes than the first one."""
    from hf_wlb.parallel.launch import joined_processes, process_rank
    from hf_wlb.profiling import layer_tokens, measure_profile

    with joined_processes(device_type) as device:
        if process_rank() > 0:
            measure_profile(config, device, options)
            return None
        with progress("making the model") as show:
            found = measure_profile(config, device, options, tell=show)
    took, wanted = found["metadata"]["seconds"], options.seconds
    if took > 1.5 * wanted and not options.quick:
        errors.print(f"Measuring took {took:.0f} s; --seconds {wanted:g} was too little for the fewest shapes.")
    measured = max(sample["tokens"] for sample in found["linear"])
    if measured < layer_tokens(options.longest)[-1] and not options.quick:
        errors.print(
            f"Layers were measured with up to {measured:,} tokens only, and what larger micro-batches cost is guessed "
            "from these. Give more --seconds."
        )
    return found
