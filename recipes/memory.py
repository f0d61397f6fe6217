"""How much memory a split takes on every GPU, by the formula of docs/launching.md: a guide, not a measurement.

    python recipes/memory.py --model ./my-model --context_length 65536 --processes 8 --cp_size 4 --fsdp

The model is a preset, or a folder or name with a config.json of a Llama-like decoder without experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_wlb.simulator.memory import (
    STATE_BYTES,
    MemoryUse,
    activation_bytes,
    exchanged_bytes,
    layer_token_bytes,
    working_weight_bytes,
)


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder.

    Attributes:
        hidden: Width of the residual stream.
        ffn: Width of the gated feed-forward layer.
        queries: Query heads times head size.
        keys: KV heads times head size.
        layers: Decoder layers.
        vocabulary: Entries.
        tied: Whether the head shares the weights of the embedding.
    """

    hidden: int
    ffn: int
    queries: int
    keys: int
    layers: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.ffn)

    @property
    def vocabulary_parameters(self) -> int:
        """Weights of the embedding and the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All weights, norms aside."""
        return self.layers * self.layer_parameters + self.vocabulary_parameters

    @classmethod
    def from_config(cls, config: Any) -> Shape:
        """Read it off a Transformers configuration."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            queries=head * config.num_attention_heads,
            keys=head * config.num_key_value_heads,
            layers=config.num_hidden_layers,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
        )


def estimate(
    shape: Shape,
    *,
    context_length: int,
    cp_size: int = 1,
    tp_size: int = 1,
    shards: int = 1,
    recomputation: bool = True,
    capacity: float = 1.25,
) -> dict[str, float]:
    """Gigabytes (10^9 bytes) on one GPU, in parts.

    Args:
        shape: Of the model.
        context_length: Tokens of a micro-batch on average.
        cp_size: GPUs that share a micro-batch.
        tp_size: GPUs that share every matrix.
        shards: GPUs that share a copy of the parameters: ``dp_shard_size * cp_size`` with FSDP, else 1.
        recomputation: Whether ``gradient_checkpointing`` is on.
        capacity: S_max over ``context_length``.
    """
    longest = capacity * context_length
    own = longest / cp_size
    kept = [layer_token_bytes(shape.hidden, shape.ffn, shape.keys, tp_size)] * shape.layers
    use = MemoryUse(
        states=STATE_BYTES * shape.parameters / (shards * tp_size),
        gathered=working_weight_bytes(
            shape.layer_parameters + shape.vocabulary_parameters, tp_size, sharded=shards > 1
        ),
        activations=activation_bytes(shape.hidden, kept, own, own, recomputation=recomputation),
        exchange=0.0 if cp_size == 1 else exchanged_bytes(shape.keys, tp_size, longest),
    )
    parts = {
        "weights, gradients, AdamW": use.states,
        "gathered weights and gradients": use.gathered,
        "activations": use.activations,
        "exchanged keys and values": use.exchange,
        "CUDA, NCCL, gaps": use.overhead,
    }
    return {name: size / 1e9 for name, size in parts.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the parts and their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="A preset, a folder or a name.")
    parser.add_argument("--context_length", type=int, required=True, help="Tokens of a micro-batch on average.")
    parser.add_argument("--processes", type=int, default=8, help="GPUs.")
    parser.add_argument("--cp_size", type=int, default=1, help="GPUs that share a micro-batch.")
    parser.add_argument("--tp_size", type=int, default=1, help="GPUs that share every matrix.")
    parser.add_argument("--dp_replicate_size", type=int, default=1, help="With --fsdp: copies of the parameters.")
    parser.add_argument("--fsdp", action="store_true", help="Share parameters out.")
    parser.add_argument("--no_recomputation", action="store_true", help="Without gradient_checkpointing.")
    args = parser.parse_args(argv)
    inner = args.cp_size * args.tp_size * (args.dp_replicate_size if args.fsdp else 1)
    if args.processes % inner:
        parser.error(f"the sizes make {inner}, which does not divide {args.processes} processes")
    found = estimate(
        _shape_of(args.model),
        context_length=args.context_length,
        cp_size=args.cp_size,
        tp_size=args.tp_size,
        shards=args.processes // inner * args.cp_size if args.fsdp else 1,
        recomputation=not args.no_recomputation,
    )
    for name, size in {**found, "together": sum(found.values())}.items():
        print(f"{name:32}{size:8.1f} GB")


def _shape_of(model: str) -> Shape:
    from transformers import AutoConfig

    from hf_wlb.presets import MODEL_PRESETS, preset_config

    return Shape.from_config(preset_config(model) if model in MODEL_PRESETS else AutoConfig.from_pretrained(model))


if __name__ == "__main__":
    main()
