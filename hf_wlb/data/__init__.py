"""Documents from text to packed micro-batches, on top of Hugging Face datasets.

Importing this loads nothing heavy: every name is looked up in its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "DocumentDataset": "hf_wlb.data.documents",
    "DocumentKey": "hf_wlb.data.documents",
    "PackedDataCollator": "hf_wlb.data.packed_collator",
    "PackedDataset": "hf_wlb.data.packed",
    "PlannedBatchSampler": "hf_wlb.data.sampler",
    "StreamingPackedDataset": "hf_wlb.data.streaming",
    "WLBDataCollator": "hf_wlb.data.collator",
    "WLBDataLoader": "hf_wlb.data.loader",
    "document_lengths": "hf_wlb.data.documents",
    "pack_dataset": "hf_wlb.data.packed",
}

if TYPE_CHECKING:
    from hf_wlb.data.collator import WLBDataCollator as WLBDataCollator
    from hf_wlb.data.documents import DocumentDataset as DocumentDataset
    from hf_wlb.data.documents import DocumentKey as DocumentKey
    from hf_wlb.data.documents import document_lengths as document_lengths
    from hf_wlb.data.loader import WLBDataLoader as WLBDataLoader
    from hf_wlb.data.packed import PackedDataset as PackedDataset
    from hf_wlb.data.packed import pack_dataset as pack_dataset
    from hf_wlb.data.packed_collator import PackedDataCollator as PackedDataCollator
    from hf_wlb.data.sampler import PlannedBatchSampler as PlannedBatchSampler
    from hf_wlb.data.streaming import StreamingPackedDataset as StreamingPackedDataset


def __getattr__(name: str) -> Any:
    """Import a public name from its module at its first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted({*globals(), *_EXPORTS})
