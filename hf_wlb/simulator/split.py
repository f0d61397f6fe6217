"""How many GPUs each kind of parallelism takes, and where its ranks lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_wlb.simulator.cluster import Group
from hf_wlb.workload import count_model
from hf_wlb.workload.base import is_whole_number


@dataclass(frozen=True)
class Split:
    """Sizes of the mesh's axes.

    From the outside in: replicas, stages, context parallel, tensor parallel; with ``fsdp`` replicas lie inside stages.
    (As ``hf_wlb.parallel.ParallelSizes`` has it, with ``dp_replicate`` or ``dp_shard`` for ``dp_size``.)

    Args:
        tp_size: Ranks that share every matrix.
        cp_size: Ranks that share every micro-batch.
        pp_size: Pipeline stages.
        dp_size: Replicas, which train micro-batches of their own.
        fsdp: Whether replicas and context-parallel ranks share the parameters out.

    Raises:
        ValueError: If a size is no whole number of at least 1.

    >>> split = Split(tp_size=8, cp_size=16, pp_size=16, dp_size=4)
    >>> split.gpus, split.label, split.cp_group
    (8192, 'TP8 CP16 PP16 DP4', Group(size=16, stride=8))
    """

    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    fsdp: bool = False

    def __post_init__(self) -> None:
        for name in ("tp_size", "cp_size", "pp_size", "dp_size"):
            value = getattr(self, name)
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.fsdp and self.cp_size * self.dp_size == 1:
            raise ValueError(
                "fsdp shares parameters out over dp_size x cp_size ranks, but both are 1. Raise one, or set fsdp=False."
            )

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp_size * self.cp_size * self.pp_size * self.dp_size

    @property
    def label(self) -> str:
        """Such as ``"TP8 CP16 PP16 DP4"``, with ``"FSDP4"`` for replicas that share parameters out."""
        replicas = "FSDP" if self.fsdp else "DP"
        return f"TP{self.tp_size} CP{self.cp_size} PP{self.pp_size} {replicas}{self.dp_size}"

    @property
    def tp_group(self) -> Group:
        """Ranks that share every matrix."""
        return Group(self.tp_size, 1)

    @property
    def cp_group(self) -> Group:
        """Ranks that share every micro-batch."""
        return Group(self.cp_size, self.tp_size)

    @property
    def pp_stride(self) -> int:
        """How many GPUs lie between a rank and its counterpart in the next stage."""
        return self.tp_size * self.cp_size * (self.dp_size if self.fsdp else 1)

    @property
    def dp_group(self) -> Group:
        """Counterparts in all replicas."""
        inner = self.tp_size * self.cp_size
        return Group(self.dp_size, inner if self.fsdp else inner * self.pp_size)

    @property
    def reduce_groups(self) -> tuple[Group, ...]:
        """Ranks that sum gradients, all replicas' context-parallel ranks, as groups one around the other.

        One group where they lie at equal distances, else the context-parallel ranks, then the replicas. None where a
        rank is alone.

        >>> Split(cp_size=4, dp_size=2).reduce_groups, Split(cp_size=4, pp_size=2, dp_size=2).reduce_groups
        ((Group(size=8, stride=1),), (Group(size=4, stride=1), Group(size=2, stride=8)))
        """
        groups = [self.cp_group, self.dp_group]
        if self.fsdp or self.pp_size == 1:
            groups = [Group(self.cp_size * self.dp_size, self.tp_size)]
        return tuple(group for group in groups if group.size > 1)

    def check_model(self, config: Any) -> None:
        """Refuse a model that cannot be shared out so.

        Args:
            config: A Transformers config, or any object with its attributes; nested text configs are entered.

        Raises:
            ValueError: If ``tp_size`` does not divide the attention heads, the feed-forward width or the vocabulary,
                does not go with the KV heads, or there are more stages than layers; or see ``count_model``.
        """
        count = count_model(config)
        text = text_config(config)
        tp, kv_heads = self.tp_size, getattr(text, "num_key_value_heads", None)
        divided = {
            "attention heads": count.num_attention_heads,
            "feed-forward width": getattr(text, "intermediate_size", None),
            "width of experts": getattr(text, "moe_intermediate_size", None),
            "vocabulary": text.vocab_size,
        }
        for what, number in divided.items():
            if isinstance(number, int) and number % tp:
                raise ValueError(f"tp_size={tp} does not divide the model's {what}, {number:,}; {_allowed(number)}.")
        if kv_heads and kv_heads % tp and tp % kv_heads:
            raise ValueError(
                f"tp_size={tp} does not go with the model's {kv_heads} KV heads: it must divide them or be a multiple."
            )
        layers = len(count.layers)
        if self.pp_size > layers:
            raise ValueError(
                f"pp_size={self.pp_size} is more than the model's {layers} layers; every stage needs one layer at "
                f"least, so set pp_size to at most {layers}."
            )


def text_config(config: Any) -> Any:
    """The part of a config that says how the decoder looks."""
    if getattr(config, "hidden_size", None) is None and getattr(config, "text_config", None) is not None:
        return config.text_config
    return config


def _allowed(number: int) -> str:
    sizes = [str(size) for size in (1, 2, 4, 8, 16, 32, 64) if number % size == 0]
    return f"powers of two that do: {', '.join(sizes)}"
