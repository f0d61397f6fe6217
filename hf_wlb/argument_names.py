"""The settings of planning and sharding by the names that they have among ``WLBTrainingArguments``, and as YAML."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

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


#: What only one packer looks at, and its default.
_OF_PACKERS: dict[str, tuple[str, ...]] = {
    "wlb": ("thresholds",),
    "steady": ("outlier_tokens", "max_time_gap", "max_wait_steps", "max_waiting_contexts"),
    "greedy": ("window_steps",),
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
    """A scalar or a list as YAML has it.

    >>> [yaml_value(value) for value in (True, "no", "runs/a b", 2e-05, 0.03, [9, 8], 7)]
    ['true', "'no'", 'runs/a b', '2.0e-05', '0.03', '[9, 8]', '7']
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        # YAML 1.1 takes 2e-05 for a string.
        return mantissa + ("" if "." in mantissa or not exponent else ".0") + exponent + power
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, str):
        plain = value and value[0].isalnum() | (value[0] in "./") and not set(value) & set(":#{}[],&*?|<>=!%@`\"'\\\n")
        words = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
        number = value.replace(".", "").replace("_", "").replace("e", "").replace("-", "").isdigit()
        return value if plain and value.lower() not in words and not number else "'" + value.replace("'", "''") + "'"
    return str(value)
