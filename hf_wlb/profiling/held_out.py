"""How far what is read off a profile is from timings of shapes that are not in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_wlb.workload import ProfiledWorkload

Sample = Mapping[str, Any]


def held_out_errors(
    profile: Mapping[str, Any], attention: Sequence[Sample] = (), linear: Sequence[Sample] = ()
) -> dict[str, Any]:
    """Relative errors of interpolation, for a profile's ``metadata``.

    Args:
        profile: Without these samples.
        attention: Samples of other shapes, as in the profile.
        linear: Samples of other numbers of tokens, as in the profile.

    Returns:
        Kind (``documents``, ``chunks``, ``attention`` for both of them, ``linear``; those of which there is a sample)
        -> ``count``, ``median_error`` and ``p90_error``; and ``samples``: kind -> what was measured, each with the
        seconds of forward plus backward that were ``predicted``.
    """
    layer = {**profile, "layers": [{"count": 1, "window": None}], "gradient_checkpointing": False}
    model = ProfiledWorkload.from_dict({**layer, "linear": [], "head": [], "embedding": []})
    whole = [sample for sample in attention if sample["q_len"] == sample["kv_len"]]
    chunks = [sample for sample in attention if sample["q_len"] < sample["kv_len"]]
    samples = {
        name: [{**sample, "predicted": model.chunk(sample["q_len"], sample["kv_len"])} for sample in found]
        for name, found in (("documents", whole), ("chunks", chunks))
    }
    if linear:
        samples["linear"] = [{**sample, "predicted": _linear(layer, sample["tokens"])} for sample in linear]
    grouped = {**samples, "attention": samples["documents"] + samples["chunks"]}
    errors = {name: _errors(found) for name, found in grouped.items() if found}
    return {**errors, "samples": {name: found for name, found in samples.items() if found}}


def _linear(layer: Mapping[str, Any], tokens: int) -> float:
    """A layer's linear work on a micro-batch of so many tokens."""
    options = {"head": [], "embedding": [], "micro_batch_tokens": tokens}
    return float(ProfiledWorkload.from_dict({**layer, **options}).linear(tokens))


def _errors(samples: Sequence[Sample]) -> dict[str, Any]:
    measured = np.array([sample["forward_seconds"] + sample["backward_seconds"] for sample in samples])
    errors = np.abs(np.array([sample["predicted"] for sample in samples]) / measured - 1)
    return {
        "count": len(samples),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }
