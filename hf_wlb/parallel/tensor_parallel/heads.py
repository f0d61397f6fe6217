"""Attention heads of which every rank has its own; keys and values are held twice where ranks are more than theirs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

_KEY_VALUE = ("k_proj", "v_proj")


@dataclass(frozen=True)
class AttentionHeads:
    """How one attention module's heads are shared out.

    Attributes:
        heads: Of queries, on all ranks together.
        ranks: That share them.
        key_value_heads: On all ranks together.
        key_value_modules: Names of its modules that make keys and values.
    """

    heads: int
    ranks: int
    key_value_heads: int
    key_value_modules: tuple[str, ...]

    @property
    def key_value_slices(self) -> int:
        """Into how many parts keys and values are split; neighbouring ranks hold the same one where these are fewer."""
        return min(self.ranks, self.key_value_heads)

    @property
    def groups(self) -> int:
        """Query heads of a rank that read the same KV head."""
        return (self.heads // self.ranks) // (self.key_value_heads // self.key_value_slices)

    def is_per_head(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether a parameter of the module is an attention sink of each query head."""
        return "sink" in name and parameter.dim() == 1 and len(parameter) == self.heads

    @classmethod
    def of(
        cls, name: str, module: torch.nn.Module, columns: Collection[str], model: PreTrainedModel, ranks: int
    ) -> AttentionHeads | None:
        """Those of a module, if it is an attention module whose heads are shared out.

        Args:
            name: Of the module.
            module: Itself.
            columns: Its modules whose output features are split.
            model: That it is in.
            ranks: To share the heads.

        Raises:
            ValueError: If the heads cannot be dealt out evenly; says what can.
        """
        if not columns or "attention" not in type(module).__name__.lower():
            return None
        heads = _figure(module, model, "num_heads", "num_attention_heads")
        projection, head_size = getattr(module, "k_proj", None), getattr(module, "head_dim", None)
        if "k_proj" in columns and isinstance(projection, torch.nn.Linear) and head_size:
            key_value = projection.out_features // int(head_size)
        else:
            key_value = _figure(module, model, "num_key_value_heads", "num_attention_heads")
        where, words = f"{name} of {type(model).__name__}", f"tp_size={ranks}"
        if heads % ranks:
            raise ValueError(
                f"{words} does not divide the {heads} attention heads of {where}. Set tp_size to {divisors(heads)}."
            )
        found = cls(heads, ranks, key_value, tuple(child for child in columns if child in _KEY_VALUE))
        if found.key_value_modules and key_value % ranks and ranks % key_value:
            able = [size for size in range(1, heads + 1) if heads % size == 0]
            able = [size for size in able if key_value % size == 0 or size % key_value == 0]
            raise ValueError(
                f"{words} neither divides the {key_value} KV heads of {where} nor is a multiple of them. Set tp_size "
                f"to {one_of(able)}."
            )
        return found


def _figure(module: torch.nn.Module, model: PreTrainedModel, *names: str) -> int:
    """The first that the module or, failing that, the configuration has."""
    config: Any = getattr(module, "config", None) or model.config.get_text_config()
    for owner in (module, config):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    raise ValueError(
        f"the configuration of {type(model).__name__} does not say {' or '.join(names)}, so its heads cannot be dealt "
        "out to tensor-parallel ranks. Set tp_size=1 for this model."
    )


def rope_features(model: PreTrainedModel, name: str) -> int:
    """Last output features of a ``mla_kv_a_proj`` module that are the rotary part of the key.

    Raises:
        ValueError: If nothing says so.
    """
    attention = model.get_submodule(name.rpartition(".")[0])
    for owner in (attention, model.config.get_text_config()):
        if size := getattr(owner, "qk_rope_head_dim", None):
            return int(size)
    raise ValueError(
        f"{name} of {type(model).__name__} makes a rotary key, but neither its module nor the configuration says of "
        "how many features (qk_rope_head_dim). Set tp_size=1 for this model."
    )


def one_of(sizes: Collection[int]) -> str:
    """In words.

    >>> one_of([1, 2, 4])
    '1, 2 or 4'
    """
    *most, last = sizes
    return f"{', '.join(map(str, most))} or {last}" if most else str(last)


def divisors(number: int, most: int = 64) -> str:
    """Sizes that divide it, in words, the largest left out.

    >>> divisors(12)
    '1, 2, 3, 4, 6 or 12'
    """
    return one_of([size for size in range(1, min(number, most) + 1) if number % size == 0])
