"""The context-parallel benchmark on two GPUs, of which single parts may have been measured: its table. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import context_parallel_report as whole


def results_tables(results: Mapping[str, Any]) -> str:
    """The Markdown between the marks of docs/results.md: what of the benchmark's tables the results have parts for.

    Raises:
        ValueError: If they have neither cases nor contexts.
    """
    parts = results["kv_heads"].values()
    tables = []
    if all("cases" in part and "choice" in part for part in parts):
        tables.append(whole.results_tables(results))
    if any("contexts" in part for part in parts):
        tables.append(contexts_table(results))
    if not tables:
        raise ValueError("The results of two GPUs hold neither cases nor contexts: run the benchmark first.")
    return "\n\n".join(tables)


def contexts_table(results: Mapping[str, Any]) -> str:
    """Time and memory when keys and values are exchanged in groups of KV heads, and kept for backward or not."""
    settings, about = results["settings"], results["environment"]
    found = {kv_heads: part["contexts"] for kv_heads, part in results["kv_heads"].items() if "contexts" in part}
    names = list(next(iter(found.values()))["ms"])
    headings = ["KV heads", "keys and values", *(f"ms, {name}" for name in names), "peak memory over allowed", "MiB"]
    lines = [
        "Attention forward + backward of one layer with all collectives under the adaptive plan, "
        f"{settings['cp_size']} x {about['device']}, kernel `{settings['kernel']}`, {settings['heads']} query heads of "
        f"size {settings['head_size']}, {settings['dtype']}: keys and values gathered in groups of KV heads, kept for "
        "backward or gathered again. *Allowed*: q, k, v, output and their gradients, plus 1.25 x the gathered keys and "
        "values.",
        "",
        f"| {' | '.join(headings)} |",
        "|" + "---|" * len(headings),
    ]
    for kv_heads, contexts in found.items():
        for label in contexts["ms"][names[0]]:
            memory = (contexts["memory"] or {}).get(label)
            shown = ["", ""] if memory is None else [f"{memory['ratio']:.3f}", f"{memory['peak_mib']:,.0f}"]
            cells = [kv_heads, label, *(f"{contexts['ms'][name][label]:.2f}" for name in names), *shown]
            lines.append(f"| {' | '.join(cells)} |")
    default = whole.context_label(settings["kv_head_groups"], settings["regather"])
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join(
        [*lines, "", f"Measured by default: *{default}*. {versions}; {about['date']}; `{about['command']}`."]
    )


def result(results: Mapping[str, Any]) -> dict[str, Any]:
    """The benchmark's figures, as far as they were measured, named after the two GPUs."""
    return {f"{name}_2gpu": figure for name, figure in results["result"].items() if figure is not None}
