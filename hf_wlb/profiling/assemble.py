"""Puts measurements together into a profile that ``ProfiledWorkload`` reads."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hf_wlb.profiling.attention import AttentionShape
from hf_wlb.workload.profile_schema import PROFILE_SCHEMA, SECTIONS, parse_profile

Sample = Mapping[str, Any]
_LIBRARIES = ("flash-attn", "flash-attn-4")


def device_name(device: torch.device) -> str:
    """What the device is called, such as "NVIDIA H100 80GB HBM3"; the processor's architecture for a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({platform.machine()})"


def library_versions() -> dict[str, str]:
    """Versions of torch, what it was built for, and the attention libraries that are installed.

    >>> "torch" in library_versions()
    True
    """
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions


def assemble_profile(
    shape: AttentionShape,
    kernel: str,
    device: torch.device,
    attention: Iterable[Sample],
    *,
    linear: Iterable[Sample] = (),
    head: Iterable[Sample] = (),
    embedding: Iterable[Sample] = (),
    collectives: Iterable[Sample] = (),
    layers: Iterable[Sample] = (),
    model: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A profile's JSON object, checked; ``ProfiledWorkload.from_dict`` takes it and saves it.

    Args:
        shape: The attention that was measured.
        kernel: Name of its kernel.
        device: Where it was measured.
        attention: See ``time_attention``.
        linear: Everything else of a layer; none for a profile of attention alone.
        head: LM head and loss.
        embedding: What comes before the first layer.
        collectives: See ``time_collectives`` and ``time_exchange``.
        layers: How many layers of every window the samples stand for; none for samples of the whole model.
        model: What else to say about the model.
        metadata: What else to say about the profile.

    Raises:
        ValueError: See ``parse_profile``.
    """
    sections = {
        "attention": attention,
        "linear": linear,
        "head": head,
        "embedding": embedding,
        "collectives": collectives,
    }
    kinds = [dict(layer) for layer in layers]
    ordered = {name: _ordered(samples, SECTIONS[name][0]) for name, samples in sections.items()}
    profile: dict[str, Any] = {
        "schema": PROFILE_SCHEMA,
        "metadata": {
            **(metadata or {}),
            "device": device_name(device),
            "dtype": str(shape.dtype).removeprefix("torch."),
            "model": {
                **(model or {}),
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "head_size": shape.head_size,
                "value_head_size": shape.values,
                "kv_width": shape.kv_width,
                "kernel": kernel,
            },
            "versions": library_versions(),
        },
        **({"layers": kinds} if kinds else {}),
        **{name: samples for name, samples in ordered.items() if samples or name in ("attention", "linear")},
    }
    parse_profile(profile)
    return profile


def _ordered(samples: Iterable[Sample], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return sorted((dict(sample) for sample in samples), key=lambda sample: [sample[key] for key in keys])
