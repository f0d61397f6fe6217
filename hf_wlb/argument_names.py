"""The settings of planning and sharding by the names that they have among ``WLBTrainingArguments``, and as YAML."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import yaml

from hf_wlb.packing.config import PackingConfig

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


#: What only one packer looks at.
_OF_PACKERS: dict[str, tuple[str, ...]] = {
    "wlb": ("thresholds",),
    "steady": ("outlier_tokens", "max_time_gap", "max_wait_steps", "max_waiting_contexts"),
    "greedy": ("window_steps",),
    "solver": ("window_steps",),
}


def as_arguments(config: PackingConfig) -> dict[str, Any]:
    """The settings as ``WLBTrainingArguments`` takes them, or a recipe's YAML; without the layout and plain defaults.

    >>> as_arguments(PackingConfig(8192, micro_batches_per_replica=4, packer="wlb", thresholds=(4096,)))
    ... # doctest: +NORMALIZE_WHITESPACE
    {'context_length': 8192, 'gradient_accumulation_steps': 4, 'packer': 'wlb',
     'max_tokens_per_micro_batch': 10240, 'outlier_thresholds': [4096]}
    """
    settings: dict[str, Any] = {
        "context_length": config.context_length,
        "micro_batches_per_replica": config.micro_batches_per_replica,
        "packer": config.packer,
    }
    if not config.fixed_length:
        settings["max_tokens_per_micro_batch"] = config.s_max
    if config.max_document_tokens is not None:
        settings["max_document_tokens"] = config.max_document_tokens
    usual = PackingConfig(config.context_length, config.micro_batches_per_replica)
    for name in ("oversize", "empty", *_OF_PACKERS.get(config.packer, ())):
        value = getattr(config, name)
        if value != getattr(usual, name):
            settings[name] = list(value) if isinstance(value, tuple) else value
    return {_ARGUMENTS.get(name, name): value for name, value in settings.items()}


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


def yaml_value(value: Any) -> str:
    """A scalar or a list as YAML has it in one line.

    >>> [yaml_value(value) for value in (True, "no", "runs/a b", 2e-05, 0.03, [9, 8], 7, "0x1F", None)]
    ['true', "'no'", 'runs/a b', '2.0e-05', '0.03', '[9, 8]', '7', "'0x1F'", 'null']
    """
    in_one_line = '"' if isinstance(value, str) and "\n" in value else None
    written: str = yaml.safe_dump(value, default_flow_style=True, default_style=in_one_line, width=float("inf"))
    return written.strip().removesuffix("\n...")
