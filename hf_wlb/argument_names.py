"""The settings of planning and sharding by the names that they have among ``WLBTrainingArguments``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

#: What settings of PackingConfig and ShardingConfig are called among these arguments, where that differs.
_ARGUMENTS = {
    "micro_batches_per_replica": "gradient_accumulation_steps",
    "oversize": "oversize_documents",
    "empty": "empty_documents",
    "thresholds": "outlier_thresholds",
    "strategy": "cp_strategy",
    "threshold": "cp_threshold",
    "max_token_skew": "cp_max_token_skew",
}
_SETTINGS = re.compile(rf"(?<![\w'/.-])({'|'.join(_ARGUMENTS)})(?![\w'/.-])")  # neither values nor parts of paths


@contextlib.contextmanager
def named_as_arguments() -> Iterator[None]:
    """Inside, a ``ValueError`` about settings calls them by the names of the arguments that the user gave.

    >>> from hf_wlb.packing import PackingConfig
    >>> with named_as_arguments():
    ...     PackingConfig(context_length=8, micro_batches_per_replica=0)
    Traceback (most recent call last):
    ValueError: gradient_accumulation_steps must be a whole number of at least 1, got 0
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(_SETTINGS.sub(lambda found: _ARGUMENTS[found[1]], str(error))) from None
