"""A workload model made of rates: seconds per causal pair and seconds per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_wlb.workload.base import (
    FloatArray,
    Lengths,
    WorkloadModel,
    causal_pairs,
    check_chunk,
    check_lengths,
    is_whole_number,
)
from hf_wlb.workload.hardware import HardwareFigures, hardware_figures
from hf_wlb.workload.model_config import count_model

UNITS = ("seconds", "relative")
ATTENTION_BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward over those of its forward: five products of a pair instead of two."""
SEGMENT_OVERHEAD_TOKENS = 150.0
"""What a row of a kernel call costs beyond its pairs, in queries over all its keys.

Backward of flash-attn 4 on a Hopper GPU, chunks of 64, 128, 256 and 512 queries over 8192 keys: 107, 202, 318 and 422
TFLOP/s, near R q / (q + 190) with R = 500; the forward loses less.
"""


def _check_rate(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, but {value!r} was given.")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and at least 0, but {value!r} was given.")
    return float(value)


@dataclass(frozen=True)
class AnalyticWorkload(WorkloadModel):
    """W(d) = sum over layer groups of seconds_per_pair * pairs(d), plus seconds_per_token * d.

    The pairs of a document of d tokens are d(d + 1)/2 in a full-attention layer and sum_i min(i, window) in a
    sliding-window layer; layers of the same window form one group, whose rates are added up.

    Args:
        attention_seconds_per_pair: of all full-attention layers together, forward plus backward.
        linear_seconds_per_token: of the whole model, forward plus backward.
        sliding_groups: (seconds_per_pair, window in tokens) of the sliding-window layers, one entry a window.
        unit: "seconds", or "relative" when only ratios mean something.
        segment_overhead_tokens: keys that a row of a kernel call costs as if so many more queries read them: what
            chunks lose to partly filled tiles and to loading keys for few queries.
        exchange_seconds_per_token: of gathering a token's keys and values over all layers and reducing their
            gradients, among very many ranks; among n it is (n - 1)/n of that.

    Raises:
        TypeError, ValueError: for rates that are no numbers, negative or all zero, a window below 1, a window
            given twice, or an unknown unit.

    >>> model = AnalyticWorkload(attention_seconds_per_pair=2.0, linear_seconds_per_token=10.0)
    >>> model.attention(4), model.linear(4), model.document(4)
    (20.0, 40.0, 60.0)
    >>> model.crossover_length
    9.0
    >>> model.chunk(2, 4) + model.chunk(2, 2) == model.document(4)
    True
    """

    attention_seconds_per_pair: float
    linear_seconds_per_token: float
    sliding_groups: tuple[tuple[float, int], ...] = ()
    unit: str = "seconds"
    segment_overhead_tokens: float = 0.0
    exchange_seconds_per_token: float = 0.0

    schema: ClassVar[str] = "hf_wlb.workload/1"

    def __post_init__(self) -> None:
        rate = _check_rate(self.attention_seconds_per_pair, "attention_seconds_per_pair")
        object.__setattr__(self, "attention_seconds_per_pair", rate)
        rate = _check_rate(self.linear_seconds_per_token, "linear_seconds_per_token")
        object.__setattr__(self, "linear_seconds_per_token", rate)
        for name in ("segment_overhead_tokens", "exchange_seconds_per_token"):
            object.__setattr__(self, name, _check_rate(getattr(self, name), name))
        groups = []
        for seconds_per_pair, window in self.sliding_groups:
            if not is_whole_number(window) or window < 1:
                raise ValueError(f"A sliding window must be a whole number of at least 1, not {window!r}.")
            groups.append((_check_rate(seconds_per_pair, "seconds_per_pair of a sliding group"), int(window)))
        groups.sort(key=lambda group: group[1])
        windows = [window for _, window in groups]
        if len(set(windows)) != len(windows):
            raise ValueError(f"sliding_groups must hold each window once (add the rates up); got {windows}.")
        object.__setattr__(self, "sliding_groups", tuple(groups))
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, but {self.unit!r} was given.")
        if not any([self.attention_seconds_per_pair, self.linear_seconds_per_token, *(r for r, _ in groups)]):
            raise ValueError("A workload model whose rates are all 0 cannot balance anything; give one rate.")

    @classmethod
    def from_crossover(cls, tokens: float, *, exchange_per_token: float = 0.02) -> AnalyticWorkload:
        """A model in relative units whose attention equals its linear work at ``tokens`` tokens.

        One token of linear work costs 1: W(d) = d + d(d + 1)/(tokens + 1), with full attention. Exchanging a token's
        keys and values costs ``exchange_per_token``: 0.01 to 0.05 for models of 7B parameters on NVLink, from grouped
        to full KV heads.

        Raises:
            ValueError: if ``tokens`` is not a positive finite number.

        >>> AnalyticWorkload.from_crossover(24_576).document(24_576)
        49152.0
        """
        if not _check_rate(tokens, "The crossover length in tokens") > 0:
            raise ValueError(f"The crossover length must be above 0 tokens, but {tokens!r} was given.")
        return cls(
            2.0 / (tokens + 1),
            1.0,
            unit="relative",
            segment_overhead_tokens=SEGMENT_OVERHEAD_TOKENS,
            exchange_seconds_per_token=_check_rate(exchange_per_token, "exchange_per_token"),
        )

    @classmethod
    def from_config(
        cls,
        config: Any,
        hardware: HardwareFigures | str = "h100",
        *,
        tp_size: int = 1,
        gradient_checkpointing: bool = False,
        gated_mlp: bool | None = None,
    ) -> AnalyticWorkload:
        """Seconds from the FLOPs of a Transformers config and the rates of a device.

        Matmuls: 2 FLOPs a weight and token forward, twice that backward. Attention: 2 FLOPs a pair and
        multiplied width forward, 2.5 times that backward, because the kernels compute the scores again (the
        paper profiles instead of counting). Checkpointing adds one forward of each layer, not of the LM head.
        Context parallelism is not an argument: it hands out a document's chunks, which ``chunk`` prices.

        What is not a matrix product costs nothing here unless the hardware figures hold an overhead, so the
        crossover length comes out short: 21K and 39K tokens for the layers of Llama-2-7B with checkpointing
        on "h100" and "h100-flash-attn-4", where about 32K and 60-70K were measured end to end.

        Args:
            config: a Transformers config, or any object with its attributes; nested text configs are entered.
            hardware: figures of one device, or a preset's name (see ``HARDWARE_PRESETS``).
            tp_size: devices that share every layer's heads and matrices evenly.
            gradient_checkpointing: whether every layer's forward runs a second time in the backward.
            gated_mlp: see ``count_model``; needed for families it does not know.

        Raises:
            ValueError: naming the attribute that is missing, the family or layer type that is not known, the
                unknown preset, or a tp_size that does not divide the attention heads.
        """
        figures = hardware_figures(hardware)
        count = count_model(config, gated_mlp=gated_mlp)
        heads = count.num_attention_heads
        if not is_whole_number(tp_size) or tp_size < 1 or heads % tp_size:
            raise ValueError(f"tp_size must divide the {heads} attention heads, but {tp_size!r} was given.")
        forwards = 2 if gradient_checkpointing else 1
        layer_weights = count.weights - count.head_weights
        flops_per_token = 2 * (layer_weights * (forwards + 2) + count.head_weights * 3)
        linear = flops_per_token / (figures.matmul_flops_per_second * tp_size)
        seconds_per_flop = (
            forwards / figures.attention_flops_per_second + ATTENTION_BACKWARD_FLOPS / figures.attention_backward_rate
        )
        rates: dict[int | None, float] = {}
        for layer in count.layers:
            seconds = 2 * (layer.qk_width + layer.v_width) * seconds_per_flop / tp_size
            rates[layer.window] = rates.get(layer.window, 0.0) + seconds
        full = rates.pop(None, 0.0)
        sliding = tuple((rate, window) for window, rate in rates.items() if window is not None)
        # Gathered once a forward and reduced once, in two bytes a number.
        per_gather = 2 * count.key_value_width / tp_size / figures.interconnect_bytes_per_second
        return cls(
            full,
            linear + figures.linear_overhead_seconds_per_token,
            sliding,
            segment_overhead_tokens=SEGMENT_OVERHEAD_TOKENS,
            exchange_seconds_per_token=per_gather * (forwards + 1),
        )

    @cached_property
    def groups(self) -> tuple[tuple[float, int | None], ...]:
        """(seconds_per_pair, window or ``None`` for full attention) of every group with a rate above 0."""
        groups: list[tuple[float, int | None]] = [(self.attention_seconds_per_pair, None)]
        groups.extend(self.sliding_groups)
        return tuple(group for group in groups if group[0] > 0)

    def attention(self, lengths: Lengths) -> Any:
        """W_a of whole documents; see ``WorkloadModel``."""
        checked: Any = check_lengths(lengths)
        return self._attention(checked)

    def _attention(self, checked: Any) -> Any:
        total: Any = 0.0 if isinstance(checked, int) else np.zeros(checked.shape)
        for seconds_per_pair, window in self.groups:
            total = total + causal_pairs(checked, window) * seconds_per_pair
        return total

    def linear(self, lengths: Lengths) -> Any:
        """W_l of whole documents; see ``WorkloadModel``."""
        checked: Any = check_lengths(lengths)
        return checked * self.linear_seconds_per_token

    def chunk(self, q_len: Lengths, kv_len: Lengths) -> Any:
        """W of a chunk; see ``WorkloadModel``. The chunks of a document sum to the document."""
        queries: Any
        keys: Any
        queries, keys = check_chunk(q_len, kv_len)
        total: Any = queries * self.linear_seconds_per_token
        for seconds_per_pair, window in self.groups:
            # Everything up to the chunk's last query, less everything before its first.
            pairs = causal_pairs(keys, window) - causal_pairs(keys - queries, window)
            total = total + pairs * seconds_per_pair
        return total

    def segment(self, q_len: NDArray[Any] | Sequence[int], kv_len: NDArray[Any] | Sequence[int]) -> FloatArray:
        """Attention of rows of a kernel call; see ``WorkloadModel``."""
        queries, keys = np.asarray(q_len, dtype=np.int64), np.asarray(kv_len, dtype=np.int64)
        total = np.zeros(queries.shape)
        for seconds_per_pair, window in self.groups:
            pairs = causal_pairs(keys, window) - causal_pairs(keys - queries, window)
            loaded = keys if window is None else np.minimum(keys, queries + window)
            wasted = np.where(queries > 0, loaded, 0) * self.segment_overhead_tokens
            total += (pairs + wasted) * seconds_per_pair
        return total

    def exchange(self, tokens: int, cp_size: int) -> float:
        """Gather and reduction of keys and values; see ``WorkloadModel``."""
        return tokens * self.exchange_seconds_per_token * (cp_size - 1) / cp_size

    @property
    def crossover_length(self) -> float:
        """Length at which attention equals linear work, to a millionth of a token; see ``WorkloadModel``.

        0.0 if attention outweighs linear work at every length.
        """
        windows = [window for _, window in self.sliding_groups]
        for low, high in zip([0, *windows], [*windows, math.inf], strict=True):
            root = self._root_between(low, high)
            if root is not None:
                return round(root, 6)
        return math.inf

    def _root_between(self, low: float, high: float) -> float | None:
        """Largest root of W_a(d) - W_l(d) in (low, high], where no window lies strictly between the two."""
        # Groups still growing quadratically: r d(d+1)/2; the others: r (w d - w(w-1)/2).
        growing = self.attention_seconds_per_pair + sum(r for r, w in self.sliding_groups if w > low)
        slope = sum(r * w for r, w in self.sliding_groups if w <= low) - self.linear_seconds_per_token
        offset = sum(r * w * (w - 1) / 2 for r, w in self.sliding_groups if w <= low)
        half, middle = growing / 2, growing / 2 + slope
        if half > 0:
            # Written without cancellation for either sign of `middle`.
            size = abs(middle) + math.sqrt(middle * middle + 4 * half * offset)
            root = size / (2 * half) if middle <= 0 else (2 * offset / size)
        elif middle > 0:
            root = offset / middle
        else:
            return None
        return root if root <= high else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable description; see ``WorkloadModel``."""
        return {
            "schema": self.schema,
            "unit": self.unit,
            "attention_seconds_per_pair": self.attention_seconds_per_pair,
            "linear_seconds_per_token": self.linear_seconds_per_token,
            "sliding_groups": [[rate, window] for rate, window in self.sliding_groups],
            "segment_overhead_tokens": self.segment_overhead_tokens,
            "exchange_seconds_per_token": self.exchange_seconds_per_token,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "The workload") -> AnalyticWorkload:
        """Rebuild a model from ``to_dict()``; ``where`` is how errors call it.

        Raises:
            TypeError, ValueError: for another schema, a missing or an unknown key, or a value out of range.
        """
        if data.get("schema") != cls.schema:
            raise ValueError(f"{where} must be of schema {cls.schema!r}, but it is of {data.get('schema')!r}.")
        keys = {field.name for field in fields(cls)}
        given = set(data) - {"schema"}
        if given != keys:
            raise ValueError(
                f"{where} needs exactly the keys {', '.join(sorted(keys))}; missing are "
                f"{sorted(keys - given)}, unknown are {sorted(given - keys)}."
            )
        groups = data["sliding_groups"]
        if not isinstance(groups, (list, tuple)) or any(
            not isinstance(group, (list, tuple)) or len(group) != 2 for group in groups
        ):
            raise ValueError(f"sliding_groups must be a list of [seconds_per_pair, window], not {groups!r}.")
        values = {key: data[key] for key in keys}
        return cls(**{**values, "sliding_groups": tuple((rate, window) for rate, window in groups)})
