"""Documents whose tokens tell where they come from, and reading that back from collated micro-batches."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_wlb.packing import PackingConfig
from hf_wlb.workload import AnalyticWorkload

WORKLOAD = AnalyticWorkload.from_crossover(8)
_STRIDE = 1000  # more than any document here is long


def marked_documents(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """Document i holds the tokens 1000 i + 1, 1000 i + 2, ...: every token of the data set is unique."""
    return [{"input_ids": [_STRIDE * i + k + 1 for k in range(n)]} for i, n in enumerate(lengths)]


def tokens_of(micro_batches: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """Count the real tokens; the dummies' zeros are left out."""
    found: Counter[int] = Counter()
    for micro_batch in micro_batches:
        found.update(token for token in micro_batch["input_ids"][0].tolist() if token)
    return found


def all_tokens(lengths: Sequence[int]) -> Counter[int]:
    """Every token of ``marked_documents`` once."""
    return Counter(token for document in marked_documents(lengths) for token in document["input_ids"])


def plain(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """Turn tensors into lists, to compare."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in micro_batch.items()}


def packing(dp_size: int = 1, micro_batches: int = 2, context: int = 16, **settings: Any) -> PackingConfig:
    """A small configuration: contexts of 16 tokens (S_max 20), 2 micro-batches a replica, steady."""
    return PackingConfig(context_length=context, micro_batches_per_replica=micro_batches, dp_size=dp_size, **settings)
