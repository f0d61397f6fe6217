"""Workload-balanced packing and sharding for long-context training with Hugging Face libraries.

An independent implementation of the method of WLB-LLM (arXiv 2503.17924).

``import hf_wlb`` loads no other module of the package and no heavy library: every public name is
looked up in its module when it is first used (PEP 562).

    >>> import hf_wlb
    >>> "WLBTrainer" in dir(hf_wlb)
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names and where each lives. Add a name here and in the TYPE_CHECKING block below;
# tests/unit/test_imports.py holds the two against each other.
_EXPORTS: dict[str, str] = {
    "AnalyticWorkload": "hf_wlb.workload",
    "PackingConfig": "hf_wlb.packing",
    "ProfiledWorkload": "hf_wlb.workload",
    "StepPlanner": "hf_wlb.packing",
    "StreamingPackedDataset": "hf_wlb.data",
    "WLBDataCollator": "hf_wlb.data",
    "WLBDataLoader": "hf_wlb.data",
    "WLBTrainer": "hf_wlb.trainer",
    "WLBTrainingArguments": "hf_wlb.training_args",
    "WorkloadModel": "hf_wlb.workload",
    "pack_dataset": "hf_wlb.data",
    "plain_attention": "hf_wlb.attention",
}

if TYPE_CHECKING:
    from hf_wlb.attention import plain_attention as plain_attention
    from hf_wlb.data import StreamingPackedDataset as StreamingPackedDataset
    from hf_wlb.data import WLBDataCollator as WLBDataCollator
    from hf_wlb.data import WLBDataLoader as WLBDataLoader
    from hf_wlb.data import pack_dataset as pack_dataset
    from hf_wlb.packing import PackingConfig as PackingConfig
    from hf_wlb.packing import StepPlanner as StepPlanner
    from hf_wlb.trainer import WLBTrainer as WLBTrainer
    from hf_wlb.training_args import WLBTrainingArguments as WLBTrainingArguments
    from hf_wlb.workload import AnalyticWorkload as AnalyticWorkload
    from hf_wlb.workload import ProfiledWorkload as ProfiledWorkload
    from hf_wlb.workload import WorkloadModel as WorkloadModel


def __getattr__(name: str) -> Any:
    """Import a public name from its module at its first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next use is a plain attribute look-up
    return value


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted({*globals(), *_EXPORTS})
