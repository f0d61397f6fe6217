"""From lengths to balanced micro-batches: readers, packers, the step planner and its metrics. No torch here."""

from hf_wlb.packing.config import PACKER_NAMES, PackingConfig
from hf_wlb.packing.metrics import PackingMetrics, PackingReport, measure
from hf_wlb.packing.planner import StepPlanner, make_packer
from hf_wlb.packing.reader import ArraySource, DocumentReader, DocumentSource, ReaderCounts
from hf_wlb.packing.step_time import StepTimeModel
from hf_wlb.packing.tuning import length_stream, tune
from hf_wlb.packing.tuning_result import TuningPoint, TuningResult, describe_settings
from hf_wlb.packing.types import Document, MicroBatch, StepPlan
from hf_wlb.packing.watching import WatchedStep, tokens_by_wait, watch

__all__ = [
    "PACKER_NAMES",
    "ArraySource",
    "Document",
    "DocumentReader",
    "DocumentSource",
    "MicroBatch",
    "PackingConfig",
    "PackingMetrics",
    "PackingReport",
    "ReaderCounts",
    "StepPlan",
    "StepPlanner",
    "StepTimeModel",
    "TuningPoint",
    "TuningResult",
    "WatchedStep",
    "describe_settings",
    "length_stream",
    "make_packer",
    "measure",
    "tokens_by_wait",
    "tune",
    "watch",
]
