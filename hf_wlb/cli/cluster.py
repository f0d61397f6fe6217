"""What the commands about clusters share: presets of GPUs, measured profiles, model shapes without Transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_wlb.analysis.inputs import model_config
from hf_wlb.presets import MODEL_PRESETS
from hf_wlb.simulator.cluster import CLUSTERS, Cluster
from hf_wlb.simulator.paper import shape_of
from hf_wlb.workload import ProfiledWorkload, load_workload


def chosen_cluster(name: str, gpus_per_node: int | None = None, memory_gb: float | None = None) -> Cluster:
    """A preset, with another size of nodes or memory if given.

    Raises:
        ValueError: If there is no such preset, or a size cannot be.
    """
    if name not in CLUSTERS:
        raise ValueError(f"--cluster must be one of {', '.join(CLUSTERS)}, got {name!r}.")
    known = CLUSTERS[name]
    return replace(
        known,
        gpus_per_node=known.gpus_per_node if gpus_per_node is None else gpus_per_node,
        memory_bytes=known.memory_bytes if memory_gb is None else memory_gb * 1e9,
    )


def measured_profile(path: str) -> ProfiledWorkload:
    """A profile that ``hf-wlb profile --json`` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is another kind of workload model.
    """
    found = load_workload(path)
    if not isinstance(found, ProfiledWorkload):
        raise ValueError(
            f"{Path(path).name} is a saved workload model and no measured profile, so it does not say what the parts "
            "of a model cost; measure one with hf-wlb profile --json."
        )
    return found


def preset_name(model: str) -> str | None:
    """A preset's name as the table of presets has it; None for a folder or a name on the Hub."""
    return next((name for name in MODEL_PRESETS if name.lower() == model.lower()), None)


def shape_or_config(model: str) -> Any:
    """A model's configuration; presets without importing Transformers, which takes longer than a simulation.

    Raises:
        ValueError: If there is none.
    """
    preset = preset_name(model)
    return model_config(model) if preset is None else shape_of(preset)
