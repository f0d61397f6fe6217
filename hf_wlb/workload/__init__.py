"""What a document, a chunk and a micro-batch cost: the workload models every policy decides by."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_wlb.workload.analytic import AnalyticWorkload
from hf_wlb.workload.base import WorkloadModel
from hf_wlb.workload.hardware import HARDWARE_PRESETS, HardwareFigures
from hf_wlb.workload.model_config import LayerCount, ModelCount, count_model
from hf_wlb.workload.profile_schema import Profile, parse_profile
from hf_wlb.workload.profiled import ProfiledWorkload, read_json

__all__ = [
    "HARDWARE_PRESETS",
    "AnalyticWorkload",
    "HardwareFigures",
    "LayerCount",
    "ModelCount",
    "Profile",
    "ProfiledWorkload",
    "WorkloadModel",
    "count_model",
    "load_workload",
    "parse_profile",
]


def load_workload(source: str | Path | Mapping[str, Any]) -> WorkloadModel:
    """Rebuild the workload model that a file or a dictionary holds, whichever kind it is.

    Args:
        source: a JSON file's path, or what ``to_dict()`` gave.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no JSON, of an unknown schema, or malformed.

    >>> model = AnalyticWorkload.from_crossover(1000)
    >>> load_workload(model.to_dict()) == model
    True
    """
    is_path = isinstance(source, (str, Path))
    data = read_json(source, "workload") if isinstance(source, (str, Path)) else source
    where = f"The workload {source}" if is_path else "The workload"
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a JSON object, but it is a {type(data).__name__}.")
    schema = data.get("schema")
    if schema == ProfiledWorkload.schema:
        return ProfiledWorkload.from_dict(data, where)
    if schema == AnalyticWorkload.schema:
        return AnalyticWorkload.from_dict(data, where)
    raise ValueError(
        f"{where} is of schema {schema!r}; known are {AnalyticWorkload.schema!r} and {ProfiledWorkload.schema!r}."
    )
