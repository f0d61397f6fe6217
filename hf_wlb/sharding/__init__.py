"""Which context-parallel rank holds which tokens of a micro-batch, and in which order; pure NumPy.

``Sharder`` turns document lengths into a ``ShardPlan``; ``shard_layout`` says what that means for one rank.
"""

from hf_wlb.sharding.cost import ShardCosts
from hf_wlb.sharding.layout import IGNORE_INDEX, Rows, ShardLayout, shard_layout, shift_labels, unshard_order
from hf_wlb.sharding.sharder import SHARDING_STRATEGIES, Sharder, ShardingConfig, ShardingStrategy
from hf_wlb.sharding.strategies import per_document, per_sequence
from hf_wlb.sharding.types import SHARDED, ShardPlan, chunk_ranks

__all__ = [
    "IGNORE_INDEX",
    "SHARDED",
    "SHARDING_STRATEGIES",
    "Rows",
    "ShardCosts",
    "ShardLayout",
    "ShardPlan",
    "Sharder",
    "ShardingConfig",
    "ShardingStrategy",
    "chunk_ranks",
    "per_document",
    "per_sequence",
    "shard_layout",
    "shift_labels",
    "unshard_order",
]
