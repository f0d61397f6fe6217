"""Pipeline parallelism: stages of an unmodified model, and micro-batches that go through them one behind the other."""

from hf_wlb.parallel.pipeline.check import check_pipeline
from hf_wlb.parallel.pipeline.parts import ModelParts, find_parts
from hf_wlb.parallel.pipeline.stage import PipelineStage, cut_stage

__all__ = ["ModelParts", "PipelineStage", "check_pipeline", "cut_stage", "find_parts"]
