"""How much memory a split takes on every GPU, by the formula of docs/launching.md: a guide, not a measurement.

    python recipes/memory.py --model ./my-model --context_length 65536 --processes 8 --cp_size 4 --fsdp
    python recipes/memory.py --model 7B --context_length 131072 --processes 32 --pp_size 4 --cp_size 2

The model is a preset, or a folder or name with a config.json of a Llama-like decoder, with experts or without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.counts import ModelShape
from hf_wlb.simulator.memory import MemoryUse, stages_memory
from hf_wlb.simulator.split import Split
from hf_wlb.staging import StageLayout

#: What a GPU holds, by the attribute of ``MemoryUse``.
PARTS = {
    "states": "weights, gradients, AdamW",
    "gathered": "gathered weights and gradients",
    "activations": "activations",
    "exchange": "exchanged keys and values",
    "overhead": "CUDA, NCCL, gaps",
}


def estimate(
    config: Any,
    split: Split,
    *,
    context_length: int,
    recomputation: bool = True,
    capacity: float = 1.25,
    stage_layers: Sequence[int] | None = None,
) -> list[MemoryUse]:
    """What a GPU of every pipeline stage holds, see ``stages_memory``.

    Args:
        config: The model's, as Transformers has it.
        split: Over which GPUs.
        context_length: Tokens of a micro-batch on average.
        recomputation: Whether ``gradient_checkpointing`` is on.
        capacity: S_max over ``context_length``.
        stage_layers: Layers of every stage; None has stages cost alike.

    Raises:
        ValueError: If the model cannot be split so.
    """
    layers = len(ModelShape.of(config).layers)
    layout = None if stage_layers is None else StageLayout.from_sizes(stage_layers, layers, split.pp_size)
    model = StepModel.of(
        config,
        split,
        CLUSTERS["h100"],
        context_length=context_length,
        gradient_checkpointing=recomputation,
        layout=layout,
    )
    return stages_memory(model, capacity)


def table(uses: Sequence[MemoryUse]) -> str:
    """Gigabytes (10^9 bytes) in parts and together, a column for every stage."""
    rows = {name: [getattr(use, part) for use in uses] for part, name in PARTS.items()}
    rows["together"] = [use.total for use in uses]
    lines = [f"{name:32}{''.join(f'{size / 1e9:9.1f}' for size in sizes)} GB" for name, sizes in rows.items()]
    heading = f"{'':32}{''.join(f'  stage {stage}' for stage in range(len(uses)))}"
    return "\n".join(lines if len(uses) == 1 else [heading, *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the parts and their sum, for every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="A preset, a folder or a name.")
    parser.add_argument("--context_length", type=int, required=True, help="Tokens of a micro-batch on average.")
    parser.add_argument("--processes", type=int, default=8, help="GPUs.")
    parser.add_argument("--pp_size", type=int, default=1, help="Pipeline stages.")
    parser.add_argument("--pp_stage_layers", type=int, nargs="+", help="Layers of every stage; default: alike in cost.")
    parser.add_argument("--cp_size", type=int, default=1, help="GPUs that share a micro-batch.")
    parser.add_argument("--tp_size", type=int, default=1, help="GPUs that share every matrix.")
    parser.add_argument("--dp_replicate_size", type=int, default=1, help="With --fsdp: copies of the parameters.")
    parser.add_argument("--fsdp", action="store_true", help="Share parameters out.")
    parser.add_argument("--no_recomputation", action="store_true", help="Without gradient_checkpointing.")
    args = parser.parse_args(argv)
    if args.dp_replicate_size != 1 and not args.fsdp:
        parser.error("--dp_replicate_size says how many copies FSDP keeps: give --fsdp, too, or leave it out")
    copies = args.dp_replicate_size
    sizes = {"pp_size": args.pp_size, "cp_size": args.cp_size, "tp_size": args.tp_size, "dp_replicate_size": copies}
    wrong = [f"--{name} {size}" for name, size in sizes.items() if size < 1]
    if wrong:
        parser.error(f"sizes are at least 1, got {', '.join(wrong)}")
    inner = args.pp_size * args.cp_size * args.tp_size * copies
    if args.processes < 1 or args.processes % inner:
        parser.error(f"the sizes make {inner}, which does not divide {args.processes} processes")
    try:
        split = Split(args.tp_size, args.cp_size, args.pp_size, args.processes // inner, args.fsdp)
        uses = estimate(
            _config_of(args.model),
            split,
            context_length=args.context_length,
            recomputation=not args.no_recomputation,
            stage_layers=args.pp_stage_layers,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(table(uses))


def _config_of(model: str) -> Any:
    from transformers import AutoConfig

    from hf_wlb.presets import MODEL_PRESETS, preset_config

    return preset_config(model) if model in MODEL_PRESETS else AutoConfig.from_pretrained(model)


if __name__ == "__main__":
    main()
