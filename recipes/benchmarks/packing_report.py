"""How the packing benchmark is shown: rows, Rich tables, pictures, the tables in Markdown, the RESULT line."""

from __future__ import annotations

from typing import Any

from packing_cases import CONTEXT, CROSSOVER, QUEUES, WLB_S_MAX
from readme_table import between_marks
from rich.table import Table

from hf_wlb.analysis import CaseResult
from hf_wlb.simulator.paper import TABLE_2

BEGIN, END = "<!-- packing-table:begin -->", "<!-- packing-table:end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- packing-summary:begin -->", "<!-- packing-summary:end -->"

#: The packers that matter most, where not all are shown.
_SHOWN = ("concat-and-cut", "next-fit", "wlb, 2 queues", "steady")

#: Column -> what it is; the same words in the JSON file, on the terminal and in docs/results.md.
COLUMNS = {
    "imbalance": "heaviest micro-batch over the mean one (max W x M / sum W), mean over the regular steps, those "
    "before the data ended",
    "step_gap": "modelled step time over perfect balance of what the step holds, regular steps",
    "delay": "mean steps a token waited; documents still waiting when the data ended count at their age then",
    "delay_worst": "longest wait of any document, in steps",
    "waiting_mean, waiting_peak": "tokens held back at the end of a step, in context lengths",
    "token_variation": "standard deviation over mean of the tokens per step, regular steps",
    "context_lost": "share of tokens whose own document's beginning was cut off",
    "work_share": "workload done over that of whole documents; those beyond the context are split there by all packers",
    "total_time": "modelled time of the whole equal set, flush included, over perfect balance of whole documents; "
    "too low where work_share is below 1",
    "total_time_own": "the same over perfect balance of the work that was done, total_time / work_share",
    "speedup": "tokens per modelled second over next-fit's, whole equal set",
    "plan_ms, plan_ms_p99": "planning time per step, median and 99th percentile: processor time, measured alone",
    "pack_ms": "mean planning time per packing decision (per window of global batches where there are windows)",
}


def row(result: CaseResult, next_fit: CaseResult | None) -> dict[str, Any]:
    """The figures of one case, rounded; the columns of ``COLUMNS``."""
    report = result.report
    return {
        "packer": result.label,
        "imbalance": round(report.imbalance, 4),
        "step_gap": round(report.time_gap, 5),
        "delay": round(report.delay, 4),
        "delay_worst": report.delay_worst,
        "waiting_mean": round(report.waiting_mean_contexts, 2),
        "waiting_peak": round(report.waiting_peak_contexts, 2),
        "token_variation": round(report.token_variation, 5),
        "context_lost": round(report.context_lost, 5),
        "work_share": round(result.work_share, 5),
        "total_time": None if result.subset else round(result.time_over_perfect, 5),
        "total_time_own": None if result.subset else round(result.time_over_own_work, 5),
        "speedup": None if result.subset or next_fit is None else round(speedup(result, next_fit), 4),
        "plan_ms": round(report.plan_ms, 3),
        "plan_ms_p99": round(report.plan_ms_p99, 3),
        "pack_ms": round(result.plan_ms_mean * result.config.window_steps, 3),
        "steps": report.steps,
        "flush_steps": report.flush_steps,
        "flush_imbalance": round(report.flush_imbalance, 4),
        "tokens": result.total_tokens,
        "documents": report.documents,
        "split": report.split,
        "truncated": report.truncated,
        "dropped": report.dropped,
    }


def speedup(result: CaseResult, next_fit: CaseResult) -> float:
    """Tokens per modelled second over next-fit's."""
    return next_fit.time_per_token / result.time_per_token


def rows(results: list[CaseResult]) -> list[dict[str, Any]]:
    """All of a table."""
    next_fit = next((result for result in results if result.config.packer == "next-fit"), None)
    return [row(result, next_fit) for result in results]


def rich_table(title: str, table_rows: list[dict[str, Any]], paper: bool) -> Table:
    """A table for the terminal."""
    table = Table(title=title, title_justify="left")
    headings = ["packer", *(["paper"] if paper else []), "imbalance", "step gap", "delay", "worst", "waiting"]
    headings += ["variation", "lost", "work", "total time", "speedup", "plan ms"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "packer" else "right")
    for r in table_rows:
        known = TABLE_2.get(r["packer"])
        cells = [r["packer"], *([f"{known.imbalance:.2f}" if known else ""] if paper else [])]
        cells += [f"{r['imbalance']:.3f}", f"{r['step_gap']:.3f}", f"{r['delay']:.2f}", str(r["delay_worst"])]
        cells += [f"{r['waiting_mean']:.1f} / {r['waiting_peak']:.1f}", f"{r['token_variation']:.3f}"]
        cells += [f"{r['context_lost']:.1%}", f"{r['work_share']:.1%}"]
        cells += [_time(r).replace(" of its own work", ""), _speedup(r)]
        table.add_row(*cells, "" if r["plan_ms"] is None else f"{r['plan_ms']:.2f}")
    return table


def results_tables(results: dict[str, Any]) -> str:
    """The Markdown between the two marks of docs/results.md, from the results file alone."""
    name = results["result"]["lengths"]
    source = results["sources"][name]
    lines = [
        f"Lengths `{name}`, context {CONTEXT:,}, 4 micro-batches, 4 pipeline stages, attention = linear work at "
        f"{CROSSOVER:,} tokens; every packer trains the same {source['documents']:,} documents "
        f"({source['steps']} steps' worth).",
        "",
        "| packer | imbalance in the paper | imbalance | delay, mean / worst steps | waiting, mean / peak contexts "
        "| token variation | context lost | time over perfect | speedup over next-fit "
        "| packing ms in the paper | packing ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_markdown_row(r) for r in source["table"]]
    lines += ["", _large_heading(source), ""]
    lines += [
        "| packer | imbalance | delay, mean / worst steps | waiting, mean / peak contexts | token variation "
        "| time over perfect | speedup over next-fit |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['packer']} | {r['imbalance']:.2f} | {_delay(r)} | {_waiting(r)} | {r['token_variation']:.3f} "
        f"| {_time(r)} | {_speedup(r)} |"
        for r in source["large"]
    ]
    sources = results["sources"]
    others = [line for other in sources if other != name for line in _other_rows(other, sources[other])]
    if others:
        lines += ["", "The same for other lengths (the sampler is built in, so that anyone can repeat it):", ""]
        lines += [
            "| lengths | micro-batches | packer | imbalance | delay, mean / worst steps "
            "| waiting, mean / peak contexts | token variation | time over perfect | speedup over next-fit |",
            "|---|---|---|---|---|---|---|---|---|",
            *others,
        ]
    scale = [] if "scale" not in results else ["", _scale(results["scale"])]
    return "\n".join([*lines, *scale, "", _footnote(results, source)])


def readme_table(results: dict[str, Any]) -> str:
    """The Markdown between the two marks of README.md: the packers that matter most, and steady on other lengths."""
    sources = results["sources"]
    source = sources[results["result"]["lengths"]]
    lines = [
        f"Modelled step time on `{results['result']['lengths']}` (context {CONTEXT:,}, 4 micro-batches, 4 pipeline "
        f"stages, attention = linear work at {CROSSOVER:,} tokens); all packers train the same "
        f"{source['documents']:,} documents. The bound is perfect balance, 1.000.",
        "",
        "| packer | imbalance in the paper | imbalance | mean delay, steps | token variation | time over the bound "
        "| speedup over next-fit |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in source["table"]:
        if r["packer"] in (*_SHOWN, "greedy, 1 global batch"):
            known = "" if TABLE_2.get(r["packer"]) is None else f"{TABLE_2[r['packer']].imbalance:.2f}"
            lines.append(
                f"| {r['packer']} | {known} | {r['imbalance']:.3f} | {r['delay']:.2f} | {r['token_variation']:.3f} "
                f"| {_time(r)} | {_speedup(r)} |"
            )
    lines += [
        "",
        "Time over the bound on other lengths and with more micro-batches (4 replicas of 16):",
        "",
        "| lengths | micro-batches | next-fit | wlb, 2 queues | steady | steady over next-fit |",
        "|---|---|---|---|---|---|",
    ]
    for name in sources:
        for count, table in ((4, sources[name]["table"]), (64, sources[name]["large"])):
            found = {r["packer"]: r for r in table}
            cells = [_time(found[packer]) for packer in ("next-fit", "wlb, 2 queues", "steady")]
            lines.append(f"| {name} | {count} | {' | '.join(cells)} | {_speedup(found['steady'])} |")
    environment = results["environment"]
    return "\n".join(
        [
            *lines,
            "",
            f"{_flattered(results)} {environment['cpu']}, {environment['date']}; `{environment['command']}`.",
        ]
    )


def _other_rows(name: str, source: dict[str, Any]) -> list[str]:
    """The packers that matter most, on another source of lengths."""
    return [
        f"| {name} | {count} | {r['packer']} | {r['imbalance']:.3f} | {_delay(r)} | {_waiting(r)} "
        f"| {r['token_variation']:.3f} | {_time(r)} | {_speedup(r)} |"
        for count, table in ((4, source["table"]), (64, source["large"]))
        for r in table
        if r["packer"] in _SHOWN
    ]


def _scale(scale: dict[str, Any]) -> str:
    return (
        f"{scale['documents']:,} lengths of the sampler in a memory-mapped file: histogram "
        f"{scale['histogram_seconds']:.1f} s, a full pass of steady ({scale['steady_steps']:,} steps) "
        f"{scale['steady_seconds']:.0f} s, peak memory +{scale['peak_growth_mb']:.0f} MB, pages of the file included."
    )


def _large_heading(source: dict[str, Any]) -> str:
    return (
        f"64 micro-batches (4 replicas of 16, 4 pipeline stages), {source['large_documents']:,} documents "
        f"({source['large_steps']} steps' worth):"
    )


def _flattered(results: dict[str, Any]) -> str:
    tables = [source[size] for source in results["sources"].values() for size in ("table", "large")]
    shares = [r["work_share"] for rows in tables for r in rows if r["packer"] == "concat-and-cut"]
    return (
        f"Concat-and-cut does only {min(shares):.1%} to {max(shares):.1%} of the work, because it cuts documents: its "
        "time, over that of all the work, flatters it."
    )


def _footnote(results: dict[str, Any], source: dict[str, Any]) -> str:
    thresholds = "; ".join(", ".join(f"{t // 1024}K" for t in levels) for levels in QUEUES.values())
    environment = results["environment"]
    return (
        "Imbalance, delay, waiting and variation are of the regular steps, before the data end. *Time over perfect* is "
        "the modelled time of all documents, flush included, over that of perfect balance. "
        f"{_flattered(results)} `*`: the solver, and greedy for comparison, on a few windows only, so without totals; "
        "the solver has a time limit, and where it finds nothing better greedy's plan stands. "
        f"wlb: S_max {WLB_S_MAX / CONTEXT:g}x, thresholds {thresholds}; steady: S_max 1.25x, default settings. "
        "Packing ms: mean processor time of one decision (of a whole window where there is one). "
        f"{environment['cpu']}, {environment['date']}; `{environment['command']}`."
    )


def _markdown_row(r: dict[str, Any]) -> str:
    paper = TABLE_2.get(r["packer"])
    mark = "\\*" if r["total_time"] is None else ""
    return (
        f"| {r['packer']}{mark} | {'' if paper is None else f'{paper.imbalance:.2f}'} | {r['imbalance']:.3f} "
        f"| {_delay(r)} | {_waiting(r)} | {r['token_variation']:.3f} | {r['context_lost']:.1%} | {_time(r)} "
        f"| {_speedup(r)} | {'' if paper is None else paper.overhead_ms} | {r['pack_ms']:,.1f} |"
    )


def _delay(r: dict[str, Any]) -> str:
    return f"{r['delay']:.2f} / {r['delay_worst']}"


def _waiting(r: dict[str, Any]) -> str:
    return f"{r['waiting_mean']:.1f} / {r['waiting_peak']:.1f}"


def _time(r: dict[str, Any]) -> str:
    if r["total_time"] is None:
        return ""
    own = f" ({r['total_time_own']:.3f} of its own work)" if r["work_share"] < 0.995 else ""
    return f"{r['total_time']:.3f}{own}"


def _speedup(r: dict[str, Any]) -> str:
    return "" if r["speedup"] is None else f"{r['speedup']:.2f}x"


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with this benchmark's tables replaced; see ``between_marks``."""
    return between_marks(page, table, BEGIN, END)


def with_summary(readme: str, table: str) -> str:
    """README's text with this benchmark's short tables replaced."""
    return between_marks(readme, table, SUMMARY_BEGIN, SUMMARY_END, "README.md")


def result_line(name: str, table: list[dict[str, Any]], large: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the last line."""
    small = {r["packer"]: r for r in table}
    wlb, steady = small["wlb, 2 queues"], small["steady"]
    steady_64 = next(r for r in large if r["packer"] == "steady")
    return {
        "lengths": name,
        "imbalance_next_fit": small["next-fit"]["imbalance"],
        "imbalance_concat_cut": small["concat-and-cut"]["imbalance"],
        "imbalance_wlb": wlb["imbalance"],
        "delay_wlb": wlb["delay"],
        "token_variation_wlb": wlb["token_variation"],
        "imbalance_steady": steady["imbalance"],
        "delay_steady": steady["delay"],
        "delay_worst_steady": steady["delay_worst"],
        "token_variation_steady": steady["token_variation"],
        "time_gap_steady": steady["step_gap"],
        "speedup_steady_over_next_fit": steady["speedup"],
        "time_gap_64": steady_64["step_gap"],
        "delay_64": steady_64["delay"],
        "delay_worst_64": steady_64["delay_worst"],
        "waiting_mean_64": steady_64["waiting_mean"],
        "waiting_peak_64": steady_64["waiting_peak"],
        "plan_ms": steady["plan_ms"],
        "plan_ms_p99": steady["plan_ms_p99"],
        "plan_ms_64": steady_64["plan_ms"],
        "plan_ms_64_p99": steady_64["plan_ms_p99"],
    }
