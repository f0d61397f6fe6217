"""How the context-parallel benchmark is shown: rows, tables, Markdown, the RESULT line. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from context_parallel_cases import (
    ADAPTIVE,
    COMPARED,
    CONTEXTS,
    LONG,
    MAX_TOKEN_SKEW,
    PER_DOCUMENT,
    PER_SEQUENCE,
    PLACED,
    Case,
    K,
)
from numpy.typing import NDArray
from readme_table import between_marks
from rich.box import SIMPLE
from rich.table import Table

from hf_wlb.sharding import ShardPlan

BEGIN, END = "<!-- context-parallel-table:begin -->", "<!-- context-parallel-table:end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- context-parallel-summary:begin -->", "<!-- context-parallel-summary:end -->"
IDEAL = "ideal"
TIE_TOLERANCE = 0.01
MOST_ERROR_RATIO = 1.5

#: What the results hold, in words; in the JSON file too.
COLUMNS = {
    "samples_ms": "attention forward + backward of one layer with all collectives, slowest rank of each repetition; "
    "ranks begin together, strategies take turns, and a spin kernel before each sample hides the host's launches, as "
    "running ahead does in training",
    "ms": "median of the samples; strategies with equal plans (same_as) are measured once",
    "ideal_ms": "the plain kernel over the whole micro-batch on one GPU, one call forward and one backward, over "
    "cp_size: median over repetitions and ranks, each of which measures it (no maximum: nobody waits for a rank here)",
    "share": "ideal_ms / ms",
    "predicted_ms": "what the cost model, profiled in the same run, predicts for the slowest rank",
    "token_skew": "largest deviation of a rank's tokens from an even share",
    "regret": "time of adaptive over that of the best fixed strategy that was measured, minus 1",
    "share_*": "least share of adaptive over the 128K cases; short: all documents under 16K tokens, long: the others",
    "regret_max": "largest regret over all cases",
    "choice_agreement": "share of random micro-batches whose predicted best of per_sequence, per_document and placed "
    "is the measured best, or within tie_tolerance of it; the least over the numbers of KV heads",
    "choice_regret_max": "time of the predicted best over that of the measured best, minus 1, largest",
    "token_skew (RESULT)": "largest of adaptive over all cases",
    "speedup_over_*": "geometric mean over all cases and numbers of KV heads of the time over adaptive's",
    "memory_ratio": "peak memory of a layer's attention, forward and backward, over local q, k, v, output and their "
    "gradients plus 1.25 x the sharded documents' keys and values, on the worst rank; in the context of the cases",
    "error_ratio": "largest over out, dq, dk, dv of the relative L2 error against float64 over the plain one-GPU "
    "kernel's",
}

Times = NDArray[np.float64]


def case_row(
    case: Case, found: Mapping[str, ShardPlan], first: Mapping[str, str], times: Mapping[str, Times], plan_ms: float
) -> dict[str, Any]:
    """The figures of one case.

    Args:
        case: The micro-batch.
        found: Every strategy's plan.
        first: The label under which each plan was measured.
        times: Seconds, ``[ranks, samples]``, by label and for ``IDEAL``.
        plan_ms: How long the adaptive plan took.
    """
    cp_size = found[ADAPTIVE].cp_size
    ideal = float(np.median(times[IDEAL])) / cp_size
    strategies: dict[str, Any] = {}
    for label, plan in found.items():
        row = {"ms": _ms(_slowest(times[first[label]])), **_plan_figures(plan)}
        row["share"] = round(ideal / _slowest(times[first[label]]), 4)
        if first[label] == label:
            row["samples_ms"] = [_ms(s) for s in times[label].max(axis=0)]
        else:
            row["same_as"] = first[label]
        strategies[label] = row
    fixed = [label for label in found if label != ADAPTIVE]
    best = min(fixed, key=lambda label: _slowest(times[first[label]]))
    return {
        "name": case.name,
        "context": case.context,
        "kind": case.kind,
        "seed": case.seed,
        "lengths": list(case.lengths),
        "longest": max(case.lengths),
        "ideal_ms": _ms(ideal),
        "ideal_samples_ms": [[_ms(s / cp_size) for s in rank] for rank in times[IDEAL]],
        "strategies": strategies,
        "best_fixed": best,
        "regret": round(_slowest(times[first[ADAPTIVE]]) / _slowest(times[first[best]]) - 1, 4),
        "plan_ms": round(plan_ms, 3),
    }


def choice_row(
    case: Case, found: Mapping[str, ShardPlan], first: Mapping[str, str], times: Mapping[str, Times]
) -> dict[str, Any]:
    """The predicted and the measured order of the strategies on one random micro-batch."""
    measured = {label: _slowest(times[first[label]]) for label in COMPARED}
    predicted = {label: _predicted(found[label]) for label in COMPARED}
    choice = min(COMPARED, key=lambda label: predicted[label])
    best = min(COMPARED, key=lambda label: measured[label])
    regret = measured[choice] / measured[best] - 1
    return {
        "name": case.name,
        "seed": case.seed,
        "tokens": sum(case.lengths),
        "documents": len(case.lengths),
        "longest": max(case.lengths),
        "predicted_ms": {label: _ms(seconds) for label, seconds in predicted.items()},
        "measured_ms": {label: _ms(seconds) for label, seconds in measured.items()},
        "samples_ms": {
            label: [_ms(s) for s in times[label].max(axis=0)] for label in COMPARED if first[label] == label
        },
        "choice": choice,
        "best": best,
        "agrees": regret <= TIE_TOLERANCE,
        "regret": round(regret, 4),
    }


def choice_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the random micro-batches say together."""
    ratios = {label: [row["predicted_ms"][label] / row["measured_ms"][label] for row in rows] for label in COMPARED}
    return {
        "tie_tolerance": TIE_TOLERANCE,
        "agreement": round(float(np.mean([row["agrees"] for row in rows])), 4),
        "agreement_without_tolerance": round(float(np.mean([row["regret"] == 0 for row in rows])), 4),
        "regret_max": max(row["regret"] for row in rows),
        "regret_mean": round(float(np.mean([row["regret"] for row in rows])), 5),
        "predicted_over_measured": {label: _spread(found) for label, found in ratios.items()},
        "micro_batches": rows,
    }


def _spread(ratios: list[float]) -> dict[str, float]:
    spread = {"median": float(np.median(ratios)), "least": min(ratios), "most": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in spread.items()}


def context_label(groups: int | None, regather: bool) -> str:
    """What tables call an attention context; None is for automatic groups."""
    shown = "automatic groups" if groups is None else f"{groups} group{'s' if groups > 1 else ''}"
    return f"{shown}, {'gathered again' if regather else 'kept'}"


def medians_ms(times: Mapping[str, Times]) -> dict[str, float]:
    """Median over repetitions of the slowest rank."""
    return {label: _ms(_slowest(found)) for label, found in times.items()}


def _slowest(seconds: Times) -> float:
    return float(np.median(seconds.max(axis=0)))


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1000, 4)


def _predicted(plan: ShardPlan) -> float:
    assert plan.predicted is not None, "every plan here is made with a workload model"
    return float(plan.predicted.max())


def _plan_figures(plan: ShardPlan) -> dict[str, Any]:
    return {
        "predicted_ms": _ms(_predicted(plan)),
        "token_skew": round(plan.token_skew, 4),
        "threshold": plan.threshold,
        "chosen": plan.strategy,
        "sharded_documents": len(plan.edges),
    }


# ---- RESULT ----


def result_line(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the last line, from whatever parts there are."""
    line: dict[str, Any] = {}
    parts = results["kv_heads"]
    cases = [row for part in parts.values() for row in part.get("cases", [])]
    for kv_heads, part in parts.items():
        for kind in ("short", "long"):
            shares = [
                row["strategies"][ADAPTIVE]["share"]
                for row in part.get("cases", [])
                if row["context"] == CONTEXTS[-1] and row["kind"] == kind
            ]
            line[f"share_{kv_heads}kv_{kind}"] = min(shares, default=None)
    choices = [part["choice"] for part in parts.values() if "choice" in part]
    line["regret_max"] = max((row["regret"] for row in cases), default=None)
    line["choice_agreement"] = min((found["agreement"] for found in choices), default=None)
    line["choice_regret_max"] = max((found["regret_max"] for found in choices), default=None)
    line["token_skew"] = max((row["strategies"][ADAPTIVE]["token_skew"] for row in cases), default=None)
    for strategy in (PER_SEQUENCE, PER_DOCUMENT):
        ratios = [row["strategies"][strategy]["ms"] / row["strategies"][ADAPTIVE]["ms"] for row in cases]
        line[f"speedup_over_{strategy}"] = round(float(np.exp(np.mean(np.log(ratios)))), 4) if ratios else None
    label = context_label(results["settings"]["kv_head_groups"], results["settings"]["regather"])
    memories = [part["contexts"]["memory"] for part in parts.values() if part.get("contexts", {}).get("memory")]
    line["memory_ratio"] = max((rows[label]["ratio"] for rows in memories), default=None)
    line["error_ratio"] = max((part["errors"]["ratio"] for part in parts.values() if "errors" in part), default=None)
    return line


# ---- the terminal ----


def cases_table(kv_heads: str, rows: list[dict[str, Any]]) -> Table:
    """Share of the ideal under every strategy."""
    title = f"{kv_heads} KV heads: percent of the ideal (skew, regret: of adaptive)"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    labels = list(rows[0]["strategies"])
    shown = [label.replace("_", " ") for label in labels]
    for heading in ("micro-batch", "docs", "longest", "ideal ms", *shown, "adaptive ms", "skew", "regret", "plan ms"):
        table.add_column(heading, justify="left" if heading == "micro-batch" else "right", no_wrap=True)
    for row in rows:
        cells = [f"{s['share'] * 100:.1f}" for s in row["strategies"].values()]
        adaptive = row["strategies"][ADAPTIVE]
        cells += [f"{adaptive['ms']:.2f}", f"{adaptive['token_skew']:.1%}"]
        head = [row["name"], str(len(row["lengths"])), f"{row['longest']:,}", f"{row['ideal_ms']:.2f}"]
        table.add_row(*head, *cells, f"{row['regret']:.1%}", f"{row['plan_ms']:.2f}")
    return table


def contexts_table(kv_heads: str, found: Mapping[str, Any]) -> Table:
    """Time and memory under groups of KV heads, gathered keys kept or not."""
    title = f"{kv_heads} KV heads: exchange in groups, adaptive plan"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    names = list(found["ms"])
    for heading in ("context", *(f"ms, {name}" for name in names), "peak memory over allowed", "MiB"):
        table.add_column(heading, justify="left" if heading == "context" else "right")
    for label in found["ms"][names[0]]:
        memory = (found["memory"] or {}).get(label)
        shown = ("", "") if memory is None else (f"{memory['ratio']:.3f}", f"{memory['peak_mib']:,.0f}")
        table.add_row(label, *(f"{found['ms'][name][label]:.2f}" for name in names), *shown)
    return table


def choice_lines(kv_heads: str, found: Mapping[str, Any]) -> list[str]:
    """What the random micro-batches say, in sentences."""
    ratios = ", ".join(
        f"{label} {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
        for label, ratio in found["predicted_over_measured"].items()
    )
    return [
        f"{kv_heads} KV heads, {len(found['micro_batches'])} random micro-batches: the predicted best is the measured "
        f"best in {found['agreement']:.1%} (within {TIE_TOLERANCE:.0%}), regret at most {found['regret_max']:.1%}, "
        f"{found['regret_mean']:.2%} on average",
        f"predicted over measured time: {ratios}",
    ]


def error_line(kv_heads: str, found: Mapping[str, Any]) -> str:
    """The error against float64, in a sentence."""
    plain = ", ".join(f"{name} {error:.2e}" for name, error in found["plain"].items())
    ratios = "; ".join(
        f"{label} {', '.join(f'{ratio:.2f}' for ratio in row['ratio'].values())}"
        for label, row in found["plans"].items()
    )
    return f"{kv_heads} KV heads, error of the plain kernel: {plain}; times it ({ratios})"


# ---- docs/results.md and README.md ----

_SHOWN = (PER_SEQUENCE, PER_DOCUMENT, PLACED, ADAPTIVE)


def results_tables(results: Mapping[str, Any]) -> str:
    """The Markdown between the two marks of docs/results.md, from the results file alone."""
    settings, environment, result = results["settings"], results["environment"], results["result"]
    lines = [
        f"Attention forward + backward of one layer with all collectives, {settings['cp_size']} x "
        f"{environment['device']}, kernel `{settings['kernel']}`, {settings['heads']} query heads of size "
        f"{settings['head_size']}, {settings['dtype']}, lengths `{settings['lengths']}`. *Ideal*: one GPU's time for "
        f"the whole micro-batch, over {settings['cp_size']}; the others are shares of it, slowest rank, median of "
        f"{settings['samples']}.",
        "",
        "| KV heads | micro-batch | documents | longest | ideal ms | per sequence | per document | placed | adaptive "
        "| adaptive ms | tokens off even | regret |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kv_heads, part in results["kv_heads"].items():
        lines += [_markdown_row(kv_heads, row) for row in part["cases"]]
    lines += ["", *_sentences(results, result), "", _footnote(environment)]
    return "\n".join(lines)


_PAPERS = (PER_SEQUENCE, PER_DOCUMENT)


def readme_table(results: Mapping[str, Any]) -> str:
    """The Markdown between the two marks of README.md: means over the micro-batches of a kind."""
    settings, environment, result = results["settings"], results["environment"], results["result"]
    lines = [
        f"Attention forward + backward of one layer with all collectives, {settings['cp_size']} x "
        f"{environment['device']}, kernel `{settings['kernel']}`, {settings['heads']} query heads of size "
        f"{settings['head_size']}, {settings['dtype']}. The bound, 100%, is one GPU's time for the whole micro-batch, "
        f"over {settings['cp_size']}; shares of it, geometric means over micro-batches of 64K and 128K tokens. "
        f"Gathered keys and values are {'gathered again in' if settings['regather'] else 'kept for'} backward.",
        "",
        "| KV heads | documents | micro-batches | per sequence | per document | placed | adaptive | adaptive, least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = {"short": f"all under {LONG // K}K", "long": "longer ones, too"}
    for kv_heads, part in results["kv_heads"].items():
        for kind, words in kinds.items():
            rows = [row for row in part["cases"] if row["kind"] == kind]
            shares = {label: [row["strategies"][label]["share"] for row in rows] for label in _SHOWN}
            cells = [f"{np.exp(np.mean(np.log(found))):.0%}" for found in shares.values()]
            lines.append(f"| {kv_heads} | {words} | {len(rows)} | {' | '.join(cells)} | {min(shares[ADAPTIVE]):.0%} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Over all of them adaptive is {result['speedup_over_per_sequence']:.2f}x as fast as per sequence and "
            f"{result['speedup_over_per_document']:.2f}x as fast as per document, and never more than "
            f"{result['regret_max']:.1%} behind the best fixed strategy. Of micro-batches of {CONTEXTS[-1] // K}K "
            f"tokens alone the least are {_least_shares(results)}. {environment['date']}.",
        ]
    )


def _least_shares(results: Mapping[str, Any]) -> str:
    """The shares of RESULT in words."""
    kinds = {"short": f"all documents under {LONG // K}K", "long": "longer ones, too"}
    shares = results["result"]
    return ", ".join(
        f"{shares[f'share_{kv_heads}kv_{kind}']:.0%} ({kv_heads} KV heads, {words})"
        for kv_heads in results["kv_heads"]
        for kind, words in kinds.items()
        if shares.get(f"share_{kv_heads}kv_{kind}") is not None
    )


def _markdown_row(kv_heads: str, row: Mapping[str, Any]) -> str:
    shares = " | ".join(f"{row['strategies'][label]['share']:.0%}" for label in _SHOWN)
    adaptive = row["strategies"][ADAPTIVE]
    return (
        f"| {kv_heads} | {row['name']} | {len(row['lengths'])} | {row['longest']:,} | {row['ideal_ms']:.2f} | {shares} "
        f"| {adaptive['ms']:.2f} | {adaptive['token_skew']:.1%} | {row['regret']:.1%} |"
    )


def _choices_in_words(results: Mapping[str, Any]) -> str:
    """How much the choice has to tell apart: which strategies were fastest, and the choice between the paper's two."""
    rows = [row for part in results["kv_heads"].values() for row in part["choice"]["micro_batches"]]
    fastest = Counter(min(row["measured_ms"], key=row["measured_ms"].__getitem__) for row in rows)
    won = ", ".join(f"{name.replace('_', ' ')} in {count}" for name, count in fastest.most_common())
    losses = []
    for row in rows:
        chosen = min(_PAPERS, key=row["predicted_ms"].__getitem__)
        losses.append(row["measured_ms"][chosen] / min(row["measured_ms"][name] for name in _PAPERS) - 1)
    right = np.mean([loss <= TIE_TOLERANCE for loss in losses])
    return (
        f": {won} of them. Between per sequence and per document alone, as in the paper, it names the faster one in "
        f"{right:.0%} and loses {np.mean(losses):.1%} on average"
    )


def _sentences(results: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    count = sum(len(part["choice"]["micro_batches"]) for part in results["kv_heads"].values())
    lines = [
        f"Over all cases adaptive is {result['speedup_over_per_sequence']:.2f}x as fast as per sequence and "
        f"{result['speedup_over_per_document']:.2f}x as fast as per document (geometric means), never more than "
        f"{result['regret_max']:.1%} behind the best fixed strategy (per sequence, per document, placed with five "
        f"thresholds and with its own). On {count} random micro-batches of 32K to 128K tokens the cost model, profiled "
        f"in the same run, names the fastest of per sequence, per document and placed in "
        f"{result['choice_agreement']:.0%} (times within {TIE_TOLERANCE:.0%} count as equal) and loses at most "
        f"{result['choice_regret_max']:.1%}{_choices_in_words(results)}. A rank's tokens are at most "
        f"{result['token_skew']:.1%} off an even share (bound {MAX_TOKEN_SKEW:.0%})."
    ]
    if result["memory_ratio"] is not None:
        lines.append(
            f"Peak memory of a layer's attention is {result['memory_ratio']:.2f} of its q, k, v, output and gradients "
            f"plus 1.25 x the gathered keys and values. The error in {results['settings']['dtype']} against float64 is "
            f"{result['error_ratio']:.2f} x that of the plain kernel on one GPU, or less."
        )
    return [" ".join(lines)]


def _footnote(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"*Mix*: documents drawn at random from the file until the micro-batch is full; short: all under {LONG // K}K "
        f"tokens. {versions}; {environment['date']}; `{environment['command']}`."
    )


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with this benchmark's table replaced; see ``between_marks``."""
    return between_marks(page, table, BEGIN, END)


def with_summary(readme: str, table: str) -> str:
    """README's text with this benchmark's short table replaced."""
    return between_marks(readme, table, SUMMARY_BEGIN, SUMMARY_END, "README.md")
