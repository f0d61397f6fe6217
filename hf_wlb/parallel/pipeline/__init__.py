"""Pipeline parallelism: stages of an unmodified model, and micro-batches that go through them one behind the other."""

from hf_wlb.parallel.pipeline.check import check_pipeline
from hf_wlb.parallel.pipeline.gradients import TiedEnds, average_gradients
from hf_wlb.parallel.pipeline.materialise import materialise
from hf_wlb.parallel.pipeline.parts import ModelParts, check_layers, find_parts
from hf_wlb.parallel.pipeline.runner import PipelineRunner
from hf_wlb.parallel.pipeline.skeleton import skeleton
from hf_wlb.parallel.pipeline.stage import PipelineStage, StandIn, cut_stage
from hf_wlb.parallel.pipeline.verification import verify_micro_batches

__all__ = [
    "ModelParts",
    "PipelineRunner",
    "PipelineStage",
    "StandIn",
    "TiedEnds",
    "average_gradients",
    "check_layers",
    "check_pipeline",
    "cut_stage",
    "find_parts",
    "materialise",
    "skeleton",
    "verify_micro_batches",
]
