"""Rich tables of a measured profile, for terminals of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_wlb.analysis.tables import empty_table, figure, legend
from hf_wlb.workload import Profile, ProfiledWorkload
from hf_wlb.workload.analytic import ATTENTION_BACKWARD_FLOPS

ATTENTION_COLUMNS = (
    ("queries, keys", "of a document (as many) or of a chunk, whose queries are the last of its keys"),
    ("FLOP/s", "of forward, then of backward: causal pairs, and 2.5 times the forward's FLOPs in backward"),
)
LINEAR_COLUMNS = (
    ("layer", "the mean layer without its attention, over a micro-batch of so many tokens"),
    ("head", "final norm, head and loss"),
)
LINK_COLUMNS = (
    ("MiB", "of the whole tensor, as every rank holds it after an all-gather"),
    ("GB/s", "that every rank sends at least, of what the operation needs"),
)
HELD_OUT_COLUMNS = (("error", "of the time that is read off the profile, in parts of the time that was measured"),)
_MOST_ROWS = 6
_SENT = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}


def profile_tables(workload: ProfiledWorkload) -> Iterator[RenderableType]:
    """Everything ``hf-wlb profile`` prints, top to bottom."""
    profile = workload.profile
    model = profile.metadata["model"]
    yield Text(
        f"{profile.metadata['device']}, {profile.metadata['dtype']}: {model['heads']} heads, {model['kv_heads']} KV "
        f"heads of {model['head_size']}, attention kernel {model['kernel']}"
    )
    yield attention_table(profile)
    yield legend(ATTENTION_COLUMNS)
    yield linear_table(profile)
    yield legend(LINEAR_COLUMNS)
    if profile.collectives:
        yield link_table(profile)
        yield legend(LINK_COLUMNS)
    held_out = profile.metadata.get("held_out", {})
    if held_out:
        yield held_out_table(held_out)
        yield legend(HELD_OUT_COLUMNS)
    yield Text(_summary(workload), "bold green")


def pair_flops(model: dict[str, Any]) -> float:
    """FLOPs of a causal pair in one layer's forward, by a profile's ``model``.

    >>> pair_flops({"heads": 4, "head_size": 8, "value_head_size": 8})
    128.0
    """
    return float(2 * model["heads"] * (model["head_size"] + model["value_head_size"]))


def attention_table(profile: Profile) -> Table:
    """One row per shape, of which there may be many: documents, then chunks of the most keys; see the columns."""
    documents = [sample for sample in profile.attention if sample[0] == sample[1]]
    most = max(keys for _, keys, *_ in profile.attention)
    chunks = [sample for sample in profile.attention if sample[0] < sample[1] == most]
    flops = pair_flops(profile.metadata["model"])
    rows: list[tuple[int, int, float, float, float, float]] = []
    for queries, keys, forward, backward in [*documents[-_MOST_ROWS:], *chunks[-_MOST_ROWS:]]:
        work = queries * (keys - (queries - 1) / 2) * flops
        rates = (work / forward, ATTENTION_BACKWARD_FLOPS * work / backward)
        rows.append((queries, keys, forward, backward, *rates))
    unit, name = (1e12, "TFLOP/s") if max(max(row[4:]) for row in rows) >= 1e11 else (1e9, "GFLOP/s")
    table = empty_table("Attention, one layer")
    for column in ("queries", "keys", "forward ms", "backward ms", name, "backward"):
        table.add_column(column, justify="right", no_wrap=True)
    for queries, keys, *times, first, second in rows:
        shown = (*map(_milliseconds, times), figure(first / unit), figure(second / unit))
        table.add_row(f"{queries:,}", f"{keys:,}", *shown)
    return table


def linear_table(profile: Profile) -> Table:
    """One row per number of tokens; see ``LINEAR_COLUMNS``."""
    tp_size = profile.metadata["model"].get("tp_size", 1)
    table = empty_table("Everything else" + (f", on each of {tp_size} ranks" if tp_size > 1 else ""))
    for column in ("tokens", "layer: forward ms", "backward ms", "us/token", "head ms", "embedding ms"):
        table.add_column(column, justify="right")
    ends = [{tokens: times for tokens, *times in section} for section in (profile.head, profile.embedding)]
    for tokens, forward, backward in profile.linear:
        others = [_milliseconds(sum(times[tokens])) if tokens in times else "" for times in ends]
        table.add_row(
            f"{tokens:,}",
            _milliseconds(forward),
            _milliseconds(backward),
            figure((forward + backward) / tokens * 1e6),
            *others,
        )
    return table


def link_table(profile: Profile) -> Table:
    """Smallest and largest message of every operation and number of ranks; see ``LINK_COLUMNS``."""
    table = empty_table("Links")
    table.add_column("operation", no_wrap=True)
    for column in ("ranks", "MiB", "ms", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for operation, ranks, size, seconds in profile.collectives:
        found.setdefault((operation, ranks), []).append((size, seconds))
    for (operation, ranks), samples in found.items():
        for size, seconds in dict.fromkeys((samples[0], samples[-1])):
            rate = ""
            if operation != "key_value_exchange":
                share = _SENT[operation] * (ranks - 1) / ranks if operation in _SENT else 1.0
                rate = figure(size * share / seconds / 1e9)
            table.add_row(operation, str(ranks), figure(size / 2**20), _milliseconds(seconds), rate)
    return table


def held_out_table(held_out: dict[str, Any]) -> Table:
    """One row per kind of shape; see ``HELD_OUT_COLUMNS``."""
    table = empty_table("Shapes that are not in the profile")
    table.add_column("kind", no_wrap=True)
    for column in ("shapes", "median error", "90th percentile"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind in ("documents", "chunks", "attention", "linear"):
        if kind in held_out:
            errors = held_out[kind]
            table.add_row(kind, str(errors["count"]), f"{errors['median_error']:.1%}", f"{errors['p90_error']:.1%}")
    return table


def _summary(workload: ProfiledWorkload) -> str:
    length = workload.crossover_length
    token = workload.linear_seconds_per_token * 1e6
    what = f"Linear work: {figure(token)} us a token over the whole model; "
    if math.isinf(length):
        return what + "attention never costs as much."
    if length == 0.0:
        return what + "attention costs more at every length."
    return what + f"a document's attention costs as much at {length:,.0f} tokens."


def _milliseconds(seconds: float) -> str:
    return figure(seconds * 1e3)
