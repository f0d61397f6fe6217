"""What WLB-LLM (arXiv 2503.17924, OSDI'25) reports, as data: its configurations, Table 2 and Figures 12 to 15.

Only what the paper prints or says in words is here: of Figure 12 the means, of Figure 14 both ends. Nothing in this
package is computed from these numbers; they stand beside ours. The paper names its models by size and prints no
shapes, so the shapes are those of ``hf_wlb.presets``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType, SimpleNamespace

from hf_wlb.presets import MODEL_PRESETS

K = 1024


@dataclass(frozen=True)
class Configuration:
    """A model, its context and how GPUs share its training.

    Attributes:
        model: Name of a preset.
        context_length: Tokens of a micro-batch on average.
        tp_size: Tensor-parallel ranks.
        cp_size: Context-parallel ranks.
        pp_size: Pipeline stages; also the micro-batches of a replica in one step, as in the paper.
        dp_size: Replicas.
    """

    model: str
    context_length: int
    tp_size: int
    cp_size: int
    pp_size: int
    dp_size: int

    @property
    def name(self) -> str:
        """As the paper calls it.

        >>> CONFIGURATIONS[0].name
        '550M-64K'
        """
        return f"{self.model}-{self.context_length // K}K"

    @property
    def gpus(self) -> int:
        """GPUs in all.

        >>> [configuration.gpus for configuration in CONFIGURATIONS]
        [32, 32, 32, 64, 64, 128, 256, 256]
        """
        return self.tp_size * self.cp_size * self.pp_size * self.dp_size

    @property
    def micro_batches(self) -> int:
        """Of one step on all replicas (the paper's global batch)."""
        return self.pp_size * self.dp_size

    @property
    def shape(self) -> SimpleNamespace:
        """The model's configuration, see ``shape_of``."""
        return shape_of(self.model)


#: Those of Figure 12, up to 256 H100.
CONFIGURATIONS = (
    Configuration("550M", 64 * K, 2, 2, 4, 2),
    Configuration("550M", 128 * K, 2, 4, 4, 1),
    Configuration("7B", 64 * K, 4, 2, 4, 1),
    Configuration("7B", 128 * K, 8, 2, 4, 1),
    Configuration("30B", 64 * K, 8, 2, 4, 1),
    Configuration("30B", 128 * K, 8, 4, 4, 1),
    Configuration("70B", 64 * K, 16, 4, 4, 1),
    Configuration("70B", 128 * K, 16, 4, 4, 1),
)
#: The one of Table 2 and Figures 13 to 15.
MAIN = CONFIGURATIONS[3]
#: The job on 8,192 GPUs that motivates the paper. Its model is not named; 70B is ours.
JOB_8192 = Configuration("70B", 128 * K, 8, 16, 16, 4)
#: The slowest GPU's computation over the mean one's, on that job.
JOB_8192_SLOWEST = 1.44

#: Figure 12: mean speed-up over Plain-4D, over all configurations and over those of one context.
FIGURE_12: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"paper": MappingProxyType({"all": 1.23, "64K": 1.15, "128K": 1.30}), "fixed-4d": MappingProxyType({"all": 1.03})}
)

#: Figure 13: speed-up over Plain-4D of parts of the method alone, 7B-128K.
FIGURE_13: Mapping[str, float] = MappingProxyType(
    {"per-document alone": 1.02, "adaptive alone": 1.05, "packing + delay alone": 1.28, "all": 1.33}
)

#: Figure 14: context length -> speed-up over Plain-4D, 7B; only the ends are known to us.
FIGURE_14: Mapping[int, float] = MappingProxyType({64 * K: 1.07, 160 * K: 1.40})
FIGURE_14_CONTEXTS = (32 * K, 64 * K, 96 * K, 128 * K, 160 * K)

#: Figure 15: (sharding, over which other, context or None for a mean) -> speed-up of one layer of 7B on 4 ranks.
FIGURE_15: Mapping[tuple[str, str, int | None], float] = MappingProxyType(
    {
        ("per_document", "per_sequence", 64 * K): 1.01,
        ("per_document", "per_sequence", 128 * K): 1.07,
        ("static", "per_sequence", None): 1.075,
        ("static", "per_document", None): 1.034,
    }
)
FIGURE_15_CP_SIZE = 4


@dataclass(frozen=True)
class PackingRow:
    """A row of Table 2 (7B, 128K): imbalance degree and packing overhead in milliseconds."""

    imbalance: float
    overhead_ms: str


#: Table 2. Its "original" stands beside both ways of packing documents as they come.
TABLE_2: Mapping[str, PackingRow] = MappingProxyType(
    {
        "concat-and-cut": PackingRow(1.44, "0"),
        "next-fit": PackingRow(1.44, "0"),
        "greedy, 1 global batch": PackingRow(1.41, "4-5"),
        "greedy, 2 global batches": PackingRow(1.22, "4-5"),
        "greedy, 4 global batches": PackingRow(1.11, "4-5"),
        "greedy, 8 global batches": PackingRow(1.08, "4-5"),
        "solver, 1 global batch": PackingRow(1.40, "467"),
        "solver, 2 global batches": PackingRow(1.18, "1,488"),
        "solver, 4 global batches": PackingRow(1.09, "25,313"),
        "wlb, 1 queue": PackingRow(1.24, "8"),
        "wlb, 2 queues": PackingRow(1.05, "20"),
        "wlb, 3 queues": PackingRow(1.05, "23"),
    }
)


def shape_of(model: str) -> SimpleNamespace:
    """A preset's shape under the names that a Transformers configuration has, made without importing Transformers.

    Args:
        model: A key of ``MODEL_PRESETS``.

    Raises:
        ValueError: If there is no such preset.

    >>> shape_of("7B").num_hidden_layers
    32
    """
    if model not in MODEL_PRESETS:
        raise ValueError(f"There is no model preset {model!r}; the presets are {', '.join(MODEL_PRESETS)}.")
    return SimpleNamespace(model_type="llama", **asdict(MODEL_PRESETS[model]))
