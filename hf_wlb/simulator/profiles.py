"""Measured profiles for simulated runs: checked against the model and the split, and read for its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_wlb.simulator.counts import ModelShape
from hf_wlb.simulator.split import Split
from hf_wlb.workload import ProfiledWorkload


def rank_profile(
    profile: ProfiledWorkload, shape: ModelShape, split: Split, gradient_checkpointing: bool
) -> ProfiledWorkload:
    """A profile as it prices one rank of a model under a split.

    Samples of a profile are of one layer, so they stand for as many layers as the model has.

    Args:
        profile: As it was measured.
        shape: Of the model.
        split: Whose tensor-parallel ranks share every matrix.
        gradient_checkpointing: Whether layers' forwards run twice.

    Raises:
        ValueError: If it was measured on another model, with another ``tp_size``, or without saying for which layers.
    """
    model, tp_size = profile.profile.metadata["model"], split.tp_size
    measured = model.get("tp_size")
    if measured is not None and measured != tp_size:
        raise ValueError(
            f"The profile was measured with tp_size={measured}, but the split has tp_size={tp_size}; measure one with "
            f"hf-wlb profile --tp {tp_size}, or simulate a split with tp_size={measured}."
        )
    attention = shape.layers[0]
    wanted: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "heads": shape.heads // tp_size,
        "kv_heads": max(1, shape.kv_heads // tp_size),
        "kv_width": int(shape.kv_width(attention, tp_size)),
    }
    if profile.profile.head or profile.profile.embedding:
        wanted["vocab_size"] = shape.vocabulary
    for key, value in wanted.items():
        if key in model and model[key] != value:
            raise ValueError(
                f"The profile was measured with {key}={model[key]}, but one of {tp_size} tensor-parallel ranks of the "
                f"model has {key}={value}; measure this model."
            )
    windows = [layer.count.window for layer in shape.layers]
    if sum(count for count, _ in profile.profile.layers) == 1 < len(windows):
        raise ValueError(
            f"The profile does not say how many layers its samples stand for, so they are of a whole model, but the "
            f"model has {len(windows)} layers. If they are of one layer, give the profile layers, such as "
            f'[{{"count": {len(windows)}, "window": null}}].'
        )
    layers = tuple((windows.count(window), window) for window in dict.fromkeys(windows))
    return replace(
        profile,
        profile=replace(profile.profile, layers=layers),
        gradient_checkpointing=gradient_checkpointing,
        micro_batch_tokens=None,
    )
