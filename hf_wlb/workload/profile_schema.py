"""The measured profile: what its file holds, and the sentences said when it holds something else.

A profile is a JSON object::

    {
      "schema": "hf_wlb.profile/1",
      "metadata": {"device": "...", "dtype": "bfloat16", "model": {...shape...}, "versions": {...}, ...},
      "layers": [{"count": 24, "window": null}, {"count": 8, "window": 4096}],
      "attention": [{"q_len": 1024, "kv_len": 1024, "forward_seconds": ..., "backward_seconds": ...}, ...],
      "linear": [{"tokens": 8192, "forward_seconds": ..., "backward_seconds": ...}, ...],
      "head": [{"tokens": 8192, "forward_seconds": ..., "backward_seconds": ...}, ...],
      "embedding": [{"tokens": 8192, "forward_seconds": ..., "backward_seconds": ...}, ...],
      "collectives": [{"operation": "all_gather", "group_size": 4, "bytes": 1048576, "seconds": ...}, ...],
      "gradient_checkpointing": false,
      "micro_batch_tokens": 131072
    }

- ``attention``: one layer's attention over a document (q_len = kv_len) or a chunk that ends at position
  kv_len, sorted by (q_len, kv_len), at least one document among them. A short document never runs alone:
  measure a call full of such documents and write down one document's share.
- ``linear``: everything else in one layer, over a micro-batch of that many tokens, sorted by tokens. Empty in a
  profile of attention alone, which prices other work at nothing.
- ``layers`` (optional): how many layers the samples stand for, by sliding window (null: full attention).
  Absent: the samples are of the whole model, with full attention in every layer.
- ``head`` (optional): LM head and loss, once a model; ``embedding`` (optional): what comes before the first layer.
- ``collectives`` (optional), sorted by (operation, group_size, bytes). ``all_gather`` and ``reduce_scatter``: ``bytes``
  is the whole tensor, as every rank holds it after an all-gather. ``all_reduce``: the tensor that every rank has.
  ``send_recv``: what one rank sends to one other, so group_size is 2. ``key_value_exchange``: all of context
  parallelism's exchange in a layer, forward plus backward, copies included; bytes of all ranks' keys and values.
- ``metadata`` may hold more than is listed, such as ``held_out``: how far what is read off the profile was from
  timings of other shapes.
- ``gradient_checkpointing``, ``micro_batch_tokens`` (optional): how to read it; see ``ProfiledWorkload``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_wlb.workload.base import is_whole_number

PROFILE_SCHEMA = "hf_wlb.profile/1"
COLLECTIVES = ("all_gather", "all_reduce", "key_value_exchange", "reduce_scatter", "send_recv")
"""Operations that a profile's ``collectives`` may hold."""

_TIMES = ("forward_seconds", "backward_seconds")
# Section -> (keys that order its samples, keys that hold times).
SECTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention": (("q_len", "kv_len"), _TIMES),
    "linear": (("tokens",), _TIMES),
    "head": (("tokens",), _TIMES),
    "embedding": (("tokens",), _TIMES),
    "collectives": (("operation", "group_size", "bytes"), ("seconds",)),
}
_REQUIRED = ("metadata", "attention", "linear")
_OPTIONAL = ("layers", "head", "embedding", "collectives", "gradient_checkpointing", "micro_batch_tokens")
_METADATA: dict[str, tuple[type, str]] = {
    "device": (str, "a text"),
    "dtype": (str, "a text"),
    "model": (dict, "an object (the model's shape)"),
    "versions": (dict, "an object (package: version)"),
}


@dataclass(frozen=True)
class Profile:
    """A checked profile; samples are tuples in the order of their keys in ``SECTIONS``."""

    metadata: dict[str, Any]
    layers: tuple[tuple[int, int | None], ...]
    attention: tuple[tuple[int, int, float, float], ...]
    linear: tuple[tuple[int, float, float], ...]
    head: tuple[tuple[int, float, float], ...]
    collectives: tuple[tuple[str, int, int, float], ...]
    embedding: tuple[tuple[int, float, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON object this profile was read from, with its defaults written out."""
        data: dict[str, Any] = {
            "schema": PROFILE_SCHEMA,
            "metadata": self.metadata,
            "layers": [{"count": count, "window": window} for count, window in self.layers],
        }
        for section, (order, times) in SECTIONS.items():
            samples = getattr(self, section)
            if samples or section in _REQUIRED:
                data[section] = [dict(zip(order + times, sample, strict=True)) for sample in samples]
        return data


def parse_profile(data: Any, where: str = "The profile") -> Profile:
    """Check a profile and return it.

    Args:
        data: the JSON object.
        where: how errors call it, e.g. "The profile runs/profile.json".

    Raises:
        ValueError: for another schema, a missing or unknown key, an empty or unsorted section, a sample out
            of range, or a value of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a JSON object, but it is {_kind(data)}.")
    schema = data.get("schema")
    if schema != PROFILE_SCHEMA:
        given = "it names no schema" if schema is None else f"its schema is {schema!r}"
        raise ValueError(
            f"{where} cannot be read: {given}, and this version reads {PROFILE_SCHEMA!r}. Measure it again."
        )
    _check_keys(data, ("schema", *_REQUIRED), _OPTIONAL, where)
    metadata = data["metadata"]
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata of {_lower(where)} must be an object, but it is {_kind(metadata)}.")
    for key, (kind, name) in _METADATA.items():
        if key not in metadata:
            raise ValueError(f"metadata of {_lower(where)} lacks {key!r}.")
        if not isinstance(metadata[key], kind):
            raise ValueError(f"metadata {key!r} of {_lower(where)} must be {name}, but it is {_kind(metadata[key])}.")
    sections = {name: _parse_section(data, name, where) for name in SECTIONS}
    profile = Profile(dict(metadata), _parse_layers(data, where), **sections)
    _check_collectives(profile, where)
    for index, (q_len, kv_len, *_) in enumerate(profile.attention):
        if q_len > kv_len:
            raise ValueError(
                f"attention[{index}] of {_lower(where)} has q_len {q_len} above its kv_len {kv_len}; "
                f"a chunk's queries are the last tokens of its kv_len keys."
            )
    if not any(q_len == kv_len for q_len, kv_len, *_ in profile.attention):
        raise ValueError(f"attention of {_lower(where)} holds no whole document (q_len equal to kv_len); measure one.")
    return profile


def _check_collectives(profile: Profile, where: str) -> None:
    for index, (operation, group_size, *_) in enumerate(profile.collectives):
        who = f"collectives[{index}] of {_lower(where)}"
        if operation not in COLLECTIVES:
            raise ValueError(f"operation of {who} must be one of {', '.join(COLLECTIVES)}, but it is {operation!r}.")
        if operation == "send_recv" and group_size != 2:
            raise ValueError(
                f"group_size of {who} must be 2, a rank that sends and one that receives, but it is {group_size}."
            )


def _parse_section(data: Mapping[str, Any], section: str, where: str) -> tuple[tuple[Any, ...], ...]:
    samples = data.get(section, [])
    name = f"{section} of {_lower(where)}"
    if not isinstance(samples, list):
        raise ValueError(f"{name} must be a list of samples, but it is {_kind(samples)}.")
    if not samples and section == "attention":
        raise ValueError(f"{name} is empty; a workload needs one sample at least.")
    order, times = SECTIONS[section]
    parsed: list[tuple[Any, ...]] = []
    for index, sample in enumerate(samples):
        who = f"{section}[{index}] of {_lower(where)}"
        if not isinstance(sample, Mapping):
            raise ValueError(f"{who} must be an object, but it is {_kind(sample)}.")
        _check_keys(sample, order + times, (), who)
        values = [_check_value(sample[key], key, who) for key in order + times]
        if parsed and tuple(values[: len(order)]) <= parsed[-1][: len(order)]:
            raise ValueError(
                f"{name} must be sorted by {', '.join(order)} without repeats, but sample {index} "
                f"{tuple(values[: len(order)])} follows {parsed[-1][: len(order)]}."
            )
        parsed.append(tuple(values))
    return tuple(parsed)


def _parse_layers(data: Mapping[str, Any], where: str) -> tuple[tuple[int, int | None], ...]:
    layers = data.get("layers", [{"count": 1, "window": None}])
    name = f"layers of {_lower(where)}"
    if not isinstance(layers, list):
        raise ValueError(f"{name} must be a list, but it is {_kind(layers)}.")
    if not layers:
        raise ValueError(f"{name} is empty; leave it out if the samples are of the whole model.")
    parsed: list[tuple[int, int | None]] = []
    for index, layer in enumerate(layers):
        who = f"layers[{index}] of {_lower(where)}"
        if not isinstance(layer, Mapping):
            raise ValueError(f"{who} must be an object, but it is {_kind(layer)}.")
        _check_keys(layer, ("count", "window"), (), who)
        window = layer["window"]
        window = window if window is None else _check_whole(window, "window", who)
        parsed.append((_check_whole(layer["count"], "count", who), window))
    windows = [window for _, window in parsed]
    if len(set(windows)) != len(windows):
        raise ValueError(f"{name} must hold each window once, but it holds {windows}.")
    return tuple(parsed)


def parse_options(data: Mapping[str, Any], where: str = "The profile") -> dict[str, Any]:
    """The checked optional ``gradient_checkpointing`` and ``micro_batch_tokens`` of a profile, where given.

    Raises:
        ValueError: if one has the wrong type or is out of range.
    """
    options = {key: data[key] for key in ("gradient_checkpointing", "micro_batch_tokens") if key in data}
    if not isinstance(options.get("gradient_checkpointing", False), bool):
        kind = _kind(options["gradient_checkpointing"])
        raise ValueError(f"gradient_checkpointing of {_lower(where)} must be true or false, but it is {kind}.")
    if options.get("micro_batch_tokens") is not None:
        _check_whole(options["micro_batch_tokens"], "micro_batch_tokens", _lower(where))
    return options


def _check_keys(data: Mapping[str, Any], needed: tuple[str, ...], extra: tuple[str, ...], who: str) -> None:
    missing = [key for key in needed if key not in data]
    if missing:
        raise ValueError(f"{who} lacks {', '.join(map(repr, missing))}.")
    unknown = sorted(str(key) for key in data if key not in needed + extra)
    if unknown:
        allowed = ", ".join(needed + extra)
        raise ValueError(f"{who} has unknown keys {', '.join(map(repr, unknown))}; allowed are {allowed}.")


def _check_text(value: Any, key: str, who: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} of {_lower(who)} must be a text, but it is {_kind(value)}.")
    return value


def _check_whole(value: Any, key: str, who: str) -> int:
    if not is_whole_number(value):
        raise ValueError(f"{key} of {_lower(who)} must be a whole number, but it is {_kind(value)}.")
    if value < 1:
        raise ValueError(f"{key} of {_lower(who)} must be at least 1, but it is {value}.")
    return int(value)


def _check_seconds(value: Any, key: str, who: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} of {_lower(who)} must be a number of seconds, but it is {_kind(value)}.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key} of {_lower(who)} must be above 0 seconds and finite, but it is {value}.")
    return float(value)


def _check_value(value: Any, key: str, who: str) -> str | int | float:
    checks: dict[str, Callable[[Any, str, str], str | int | float]] = {"operation": _check_text}
    check = checks.get(key, _check_seconds if key.endswith("seconds") else _check_whole)
    return check(value, key, who)


def _kind(value: Any) -> str:
    """What a JSON value is, for an error."""
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"


def _lower(where: str) -> str:
    """``where`` for the middle of a sentence."""
    return where[0].lower() + where[1:]
