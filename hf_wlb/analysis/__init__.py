"""What packing would bring for given data: every packer on the same documents, and recommended settings."""

from hf_wlb.analysis.cases import PackerCase, comparable, standard_cases
from hf_wlb.analysis.comparison import Analysis, CaseResult, analyze, bar_label, equal_documents, run_case
from hf_wlb.analysis.inputs import LengthSource, choose_workload, read_lengths
from hf_wlb.analysis.recommendation import Recommendation, recommend

__all__ = [
    "Analysis",
    "CaseResult",
    "LengthSource",
    "PackerCase",
    "Recommendation",
    "analyze",
    "bar_label",
    "choose_workload",
    "comparable",
    "equal_documents",
    "read_lengths",
    "recommend",
    "run_case",
    "standard_cases",
]
