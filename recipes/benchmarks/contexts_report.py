"""The context-parallel benchmark's part about groups of KV heads, measured by itself: its table. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import context_parallel_report as whole


def contexts_table(results: Mapping[str, Any]) -> str:
    """Time and memory when keys and values are exchanged in groups of KV heads, and kept for backward or not.

    Raises:
        ValueError: If the results hold no such part.
    """
    settings, about = results["settings"], results["environment"]
    found = {kv_heads: part["contexts"] for kv_heads, part in results["kv_heads"].items() if "contexts" in part}
    if not found:
        raise ValueError("The results hold no contexts: run the benchmark with --parts contexts first.")
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
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join(
        [*lines, "", f"{_shares(results)}{versions}; {about['date']}, commit {about['commit']}; `{about['command']}`."]
    )


def _shares(results: Mapping[str, Any]) -> str:
    """What the automatic settings reach of the bound, one GPU's time over the ranks."""
    said = []
    for kv_heads, part in results["kv_heads"].items():
        for case in part.get("cases", []):
            times = part.get("contexts", {}).get("ms", {}).get(case["name"])
            if times is not None:
                again, kept = (
                    case["ideal_ms"] / times[whole.context_label(None, regather)] for regather in (True, False)
                )
                said.append(f"{again:.0%} and {kept:.0%} ({kv_heads} KV heads, {case['name']})")
    return f"Of the bound, automatic groups reach, gathered again and kept: {'; '.join(said)}. " if said else ""


def result(results: Mapping[str, Any]) -> dict[str, Any]:
    """The largest of the peaks over what is allowed, with settings that are automatic: gathered again, and kept."""
    found = {}
    for name, regather in (("gathered_again", True), ("kept", False)):
        memories = [part["contexts"]["memory"] for part in results["kv_heads"].values() if "contexts" in part]
        ratios = [memory[whole.context_label(None, regather)]["ratio"] for memory in memories if memory is not None]
        found[f"memory_ratio_{name}"] = max(ratios, default=None)
    return found
