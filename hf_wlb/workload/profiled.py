"""A workload model made of measurements on the hardware in use."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_wlb.workload.base import (
    MAX_LENGTH,
    FloatArray,
    Lengths,
    WorkloadModel,
    check_chunk,
    check_lengths,
    is_whole_number,
)
from hf_wlb.workload.curves import AttentionCurve, PowerCurve, SegmentTable
from hf_wlb.workload.profile_schema import PROFILE_SCHEMA, Profile, parse_options, parse_profile

_LONGEST_IN_TABLE = 2**22
_Samples = tuple[tuple[int, int, float, float], ...]
_Layers = tuple[tuple[int, int | None], ...]
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ProfiledWorkload(WorkloadModel):
    """W(d) read off a measured profile (file format: ``hf_wlb.workload.profile_schema``).

    Attention is interpolated as ``AttentionCurve`` says. Linear work has one rate: matmuls and element-wise
    kernels run over the whole micro-batch, so a short document costs its share of it, not what it would cost
    alone. The rate is read at ``micro_batch_tokens``. Unlike counted pairs, the chunks of a document may cost
    more together than the document, where short chunks run slower.

    Args:
        profile: a checked profile, from ``parse_profile``.
        gradient_checkpointing: whether every layer's forward (not the head's, nor the embedding's) runs twice.
        micro_batch_tokens: tokens of a typical micro-batch; ``None`` takes the largest one measured.

    Raises:
        ValueError: if ``micro_batch_tokens`` is below 1.
    """

    profile: Profile
    gradient_checkpointing: bool = False
    micro_batch_tokens: int | None = None

    schema: ClassVar[str] = PROFILE_SCHEMA

    def __post_init__(self) -> None:
        tokens = self.micro_batch_tokens
        if tokens is not None and (not is_whole_number(tokens) or tokens < 1):
            raise ValueError(f"micro_batch_tokens must be a whole number of at least 1, not {tokens!r}.")

    @property
    def compiled(self) -> bool:
        """Whether layers were compiled (``torch_compile``) when they were measured."""
        return bool(self.profile.metadata.get("compiled", False))

    @cached_property
    def _attention_curve(self) -> AttentionCurve:
        return _attention_curve(self.profile.attention, self._forwards)

    @cached_property
    def linear_seconds_per_token(self) -> float:
        """Forward plus backward of everything but attention, over the whole model; 0 where none was measured."""
        ends = [samples for samples in (self.profile.head, self.profile.embedding) if samples]
        measured = [self.profile.linear, *ends] if self.profile.linear else ends
        if not measured:
            return 0.0
        at = np.array([self.micro_batch_tokens or measured[0][-1][0]], dtype=np.float64)
        seconds = np.zeros(1)
        if self.profile.linear:
            layers = sum(count for count, _ in self.profile.layers)
            tokens, forward, backward = zip(*self.profile.linear, strict=True)
            seconds = layers * PowerCurve(tokens, _seconds(forward, backward, self._forwards))(at)
        for samples in ends:
            tokens, forward, backward = zip(*samples, strict=True)
            seconds = seconds + PowerCurve(tokens, _seconds(forward, backward))(at)
        return float(seconds[0] / at[0])

    @property
    def _forwards(self) -> int:
        """Of every layer in a step."""
        return 2 if self.gradient_checkpointing else 1

    def _attention(self, q_len: FloatArray, kv_len: FloatArray) -> FloatArray:
        return _of_all_layers(self._attention_curve, self.profile.layers, q_len, kv_len)

    def attention(self, lengths: Lengths) -> Any:
        """W_a of whole documents; see ``WorkloadModel``."""
        checked: Any = check_lengths(lengths)
        tokens = np.asarray(checked, dtype=np.float64)
        seconds = self._attention(tokens, tokens)
        return float(seconds) if isinstance(checked, int) else seconds

    def linear(self, lengths: Lengths) -> Any:
        """W_l of whole documents; see ``WorkloadModel``."""
        checked: Any = check_lengths(lengths)
        return checked * self.linear_seconds_per_token

    def chunk(self, q_len: Lengths, kv_len: Lengths) -> Any:
        """W of a chunk; see ``WorkloadModel``."""
        queries: Any
        keys: Any
        queries, keys = check_chunk(q_len, kv_len)
        seconds = self._attention(np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64))
        total = seconds + queries * self.linear_seconds_per_token
        return float(total) if isinstance(queries, int) and isinstance(keys, int) else total

    def segment(self, q_len: NDArray[Any] | Sequence[int], kv_len: NDArray[Any] | Sequence[int]) -> FloatArray:
        """Attention of rows of a kernel call, to 1% or so what ``chunk`` reads; see ``WorkloadModel``."""
        return self._segments(np.asarray(q_len), np.asarray(kv_len))

    @cached_property
    def _segments(self) -> SegmentTable:
        samples, layers = (tuple(map(tuple, rows)) for rows in (self.profile.attention, self.profile.layers))
        return _segment_table(samples, layers, self._forwards)

    def exchange(self, tokens: int, cp_size: int) -> float:
        """Gathers of keys and values and the reduction of their gradients; see ``WorkloadModel``.

        Taken from samples of ``key_value_exchange`` if there are any for that many ranks (copies and gathering again
        in backward are then in it), else put together from bare all-gathers and reduce-scatters.

        Raises:
            ValueError: if the profile holds no such collectives, or its metadata's ``model`` does not say
                ``kv_width`` (numbers that a token's keys and values hold in one layer) or the dtype is unknown.
        """
        if cp_size == 1 or not tokens:
            return 0.0
        layers = sum(count for count, _ in self.profile.layers)
        size = tokens * self._kv_width * _ITEM_BYTES[self._dtype]
        whole = ("key_value_exchange", cp_size)
        if whole in self._collective_curves:
            seconds = self.collective_seconds(*whole, size)
        else:
            seconds = self.collective_seconds("all_gather", cp_size, size)
            seconds += self.collective_seconds("reduce_scatter", cp_size, size)
        if self.gradient_checkpointing:  # the forward that runs again gathers again
            seconds += self.collective_seconds("all_gather", cp_size, size)
        return layers * seconds

    @cached_property
    def _kv_width(self) -> int:
        width = self.profile.metadata["model"].get("kv_width")
        if not is_whole_number(width) or width < 1:
            raise ValueError(
                "The profile's metadata does not say kv_width of the model (numbers that a token's keys and values "
                f"hold in one layer), but {width!r}: what context parallelism exchanges cannot be priced."
            )
        return int(width)

    @cached_property
    def _dtype(self) -> str:
        dtype = str(self.profile.metadata["dtype"]).removeprefix("torch.")
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"The profile's dtype must be one of {', '.join(_ITEM_BYTES)}, got {dtype!r}.")
        return dtype

    @cached_property
    def crossover_length(self) -> float:
        """Length from which on attention outweighs linear work, to a millionth of a token; ``inf`` if none.

        Where short documents are slow the two may be equal more than once; this is the last such length.
        """
        grid = np.exp2(np.linspace(0, math.log2(MAX_LENGTH), 500))
        heavier = self._attention(grid, grid) >= grid * self.linear_seconds_per_token
        if not heavier[-1]:
            return math.inf
        if heavier.all():
            return 0.0
        last = int(np.flatnonzero(~heavier)[-1])
        low, high = float(grid[last]), float(grid[last + 1])
        for _ in range(64):
            middle = np.asarray((low + high) / 2)
            if self._attention(middle, middle) >= middle * self.linear_seconds_per_token:
                high = float(middle)
            else:
                low = float(middle)
        return round(high, 6)

    def collective_seconds(self, operation: str, group_size: int, size_bytes: int) -> float:
        """Seconds of a collective; below the smallest measured size its time, above the largest its rate.

        Raises:
            ValueError: if the profile holds no sample of that operation and group size.
        """
        found = self._collective_curves.get((operation, group_size))
        if found is None:
            known = sorted(f"{op} over {group}" for op, group in self._collective_curves)
            raise ValueError(
                f"The profile holds no time of {operation} over {group_size} ranks; it holds "
                f"{', '.join(known) if known else 'no collectives at all'}."
            )
        smallest, curve = found
        return float(curve(np.array([max(size_bytes, smallest)], dtype=np.float64))[0])

    @cached_property
    def _collective_curves(self) -> dict[tuple[str, int], tuple[int, PowerCurve]]:
        """By operation and group size: the smallest measured size, and the time of others."""
        samples: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for operation, group_size, size, seconds in self.profile.collectives:
            samples.setdefault((operation, group_size), []).append((size, seconds))
        return {key: (own[0][0], PowerCurve(*zip(*own, strict=True))) for key, own in samples.items()}

    def to_dict(self) -> dict[str, Any]:
        """The profile's JSON object, with how it is read; see ``WorkloadModel``."""
        data = self.profile.to_dict()
        data["gradient_checkpointing"] = self.gradient_checkpointing
        data["micro_batch_tokens"] = self.micro_batch_tokens
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "The profile") -> ProfiledWorkload:
        """Check a profile's JSON object and build the model; ``where`` is how errors call it.

        Raises:
            ValueError: see ``parse_profile``.
        """
        profile = parse_profile(data, where)
        return cls(profile, **parse_options(data, where))

    @classmethod
    def load(cls, path: str | Path) -> ProfiledWorkload:
        """Read a profile file.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no JSON, or see ``parse_profile``.
        """
        return cls.from_dict(read_json(path, "profile"), f"The profile {path}")


def _seconds(forward: Sequence[float], backward: Sequence[float], forwards: int = 1) -> list[float]:
    """For every sample."""
    return [forwards * f + b for f, b in zip(forward, backward, strict=True)]


def _attention_curve(samples: _Samples, forwards: int) -> AttentionCurve:
    q_lens, kv_lens, forward, backward = zip(*samples, strict=True)
    return AttentionCurve(q_lens, kv_lens, _seconds(forward, backward, forwards))


def _of_all_layers(curve: AttentionCurve, layers: _Layers, q_len: FloatArray, kv_len: FloatArray) -> FloatArray:
    total = np.zeros(np.broadcast_shapes(q_len.shape, kv_len.shape))
    for count, window in layers:
        total = total + count * curve.seconds(q_len, kv_len, window)
    return total


def _kinks(curve: AttentionCurve, layers: _Layers, steps: FloatArray) -> tuple[FloatArray, FloatArray]:
    q_lens, kv_lens = zip(*(curve.kinks(steps, window) for _, window in layers), strict=True)
    return np.concatenate(q_lens), np.concatenate(kv_lens)


@lru_cache(maxsize=8)
def _segment_table(samples: _Samples, layers: _Layers, forwards: int) -> SegmentTable:
    """Made in a third of a second for a usual profile, and kept for other models of the same one: 4 MB each."""
    curve = _attention_curve(samples, forwards)
    return SegmentTable(partial(_of_all_layers, curve, layers), _LONGEST_IN_TABLE, partial(_kinks, curve, layers))


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file; ``what`` is how errors call it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no JSON.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no {what} file {path}.")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"The {what} {path} is no JSON file: {error}.") from error
