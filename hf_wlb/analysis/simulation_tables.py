"""Rich tables of simulated systems and of the paper's evaluation, the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_wlb.analysis.tables import empty_table, figure, legend
from hf_wlb.plots.style import token_text
from hf_wlb.simulator.comparison import BASELINE, CUT, SYSTEM_LABELS

Row = Mapping[str, Any]

SYSTEM_COLUMNS = (
    ("step s", "mean seconds of a step, steps after the end of the data included; steps differ in tokens"),
    ("tok/s/GPU", "tokens a second on one GPU, whole pass"),
    ("speed-up", f"time of {BASELINE} over this, same documents; {CUT!r} cuts them, so does less attention"),
    ("MFU %", "model FLOPs over 989 TFLOP/s a GPU"),
    ("heaviest", "costliest micro-batch over the mean one (imbalance degree), regular steps"),
    ("delay", "mean steps that a token waited"),
    ("busy %", "share of the pipeline's time in which a stage computes"),
    ("GB", "of the GPU that needs most, by the formula of docs/launching.md"),
)
_SHORT = {"per_sequence": "per-sequence", "per_document": "per-document", "static": "faster of both"}


def system_table(figures: Mapping[str, Row], title: str) -> Table:
    """One row per system; see ``SYSTEM_COLUMNS``."""
    table = empty_table(title)
    table.add_column("system", no_wrap=True)
    for name, _ in SYSTEM_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in figures.items():
        table.add_row(
            name,
            figure(row["step_seconds"]),
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['speedup']:.2f}x" if "speedup" in row else "",
            f"{row['mfu'] * 100:.1f}",
            f"{row['imbalance']:.2f}",
            f"{row['delay']:.2f}",
            f"{row['busy'] * 100:.0f}",
            f"{row['memory_gb']:.0f}",
            style="bold" if name in ("wlb", "placed") else "dim" if name == "balanced" else None,
        )
    return table


def paper_tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Everything ``hf-wlb simulate --paper`` prints, top to bottom."""
    yield Text(f"Lengths: {_data(found['data'])}")
    yield Text(f"Flatter lengths: {_data(found['flat_data'])}")
    yield Text("Model shapes are this library's presets: the paper prints none. No constant was fitted to the paper.")
    yield packing_table(found["table2"])
    yield speedup_table(found["fig12"])
    yield mean_table(found["fig12"])
    yield part_table(found["fig13"])
    yield context_table(found["fig14"])
    yield layer_table(found["fig15"])
    yield from job_tables(found["job8192"])
    yield explanation_table(found["explanation"], found["fig12"])
    yield sensitivity_table(found["sensitivity"])


def packing_table(rows: Sequence[Row]) -> Table:
    """Table 2."""
    table = empty_table("Table 2: packing, 7B, 128K, 4 micro-batches, attention = linear work at 24,576 tokens")
    table.add_column("packer", no_wrap=True)
    for name in ("paper", "imbalance", "delay", "variation", "paper ms", "ms", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["packer"],
            "" if row["paper"] is None else f"{row['paper']:.2f}",
            f"{row['imbalance']:.3f}",
            f"{row['delay']:.2f}",
            f"{row['token_variation']:.3f}",
            row["paper_ms"] or "",
            f"{row['pack_ms']:,.1f}",
            str(row["steps"]),
        )
    return table


def speedup_table(fig12: Mapping[str, Any]) -> Table:
    """Figure 12, one row per configuration."""
    rows = fig12["rows"]
    systems = [name for name in SYSTEM_LABELS if name in rows[0]["systems"] and name != BASELINE]
    table = empty_table("Figure 12: speed-up over Plain-4D, same documents")
    table.add_column("configuration", no_wrap=True)
    table.add_column("split", no_wrap=True)
    table.add_column("checkpoints")
    table.add_column("plain s", justify="right")
    for name in systems:
        table.add_column(SYSTEM_LABELS[name], justify="right")
    for row in rows:
        table.add_row(
            row["configuration"],
            row["split"],
            "yes" if row["gradient_checkpointing"] else "no",
            figure(row["systems"][BASELINE]["step_seconds"]),
            *(f"{row['systems'][name]['speedup']:.3f}" for name in systems),
        )
    return table


def mean_table(fig12: Mapping[str, Any]) -> Table:
    """Figure 12's means, the paper's beside."""
    table = empty_table("Figure 12: means")
    table.add_column("system", no_wrap=True)
    groups = [group for group in ("all", "64K", "128K") if group in fig12["means"][BASELINE]["over_plain"]]
    for group in groups:
        table.add_column(group, justify="right", no_wrap=True)
        table.add_column(f"paper {group}", justify="right", no_wrap=True)
    for name in ("without 550M", "all, over cut", "before the data end", "flash-attn 4", "flatter data"):
        table.add_column(name, justify="right")
    for name, means in fig12["means"].items():
        if name == BASELINE:
            continue
        stated = fig12["paper"].get(name, {})
        cells = []
        for group in groups:
            cells += [f"{means['over_plain'][group]:.3f}", f"{stated[group]:.2f}" if group in stated else ""]
        others = [fig12[which]["means"].get(name) for which in ("fast_kernel", "flat_data")]
        table.add_row(
            SYSTEM_LABELS[name],
            *cells,
            f"{means['over_plain']['without 550M']:.3f}" if "without 550M" in means["over_plain"] else "",
            f"{means['over_cut']['all']:.3f}",
            f"{means['regular_over_plain']:.3f}",
            *("" if other is None else f"{other['over_plain']['all']:.3f}" for other in others),
            style="bold" if name == "placed" else None,
        )
    return table


def part_table(rows: Sequence[Row]) -> Table:
    """Figure 13."""
    table = empty_table("Figure 13: parts alone, 7B-128K, speed-up over Plain-4D")
    for name in ("part", "packer", "sharding"):
        table.add_column(name, no_wrap=True)
    for name in ("paper", "simulated"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        stated = "" if row["paper"] is None else f"{row['paper']:.2f}"
        sharding = _SHORT.get(row["sharding"], row["sharding"])
        table.add_row(row["name"], row["packer"], sharding, stated, f"{row['speedup']:.3f}")
    return table


def context_table(rows: Sequence[Row]) -> Table:
    """Figure 14."""
    table = empty_table("Figure 14: 7B with other contexts, split as for 128K, speed-up over Plain-4D")
    table.add_column("context", justify="right")
    for name in ("paper", "paper's method", "over cut", "ours, placed", "over cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        stated = "" if row["paper"] is None else f"{row['paper']:.2f}"
        cells = [
            f"{row['systems'][name][key]:.3f}"
            for name in ("paper", "placed")
            for key in ("speedup", "speedup_over_cut")
        ]
        table.add_row(token_text(row["context"]), stated, *cells)
    return table


def layer_table(fig15: Mapping[str, Any]) -> Table:
    """Figure 15."""
    names = list(fig15["rows"][0]["speedup"])
    names = [name for name in names if name not in ("ideal", "per_sequence")]
    table = empty_table("Figure 15: one layer of 7B on 4 context-parallel ranks, speed-up over per-sequence")
    for name in ("context", "TP", "per-sequence ms", *(_SHORT.get(name, name) for name in names), "ideal"):
        table.add_column(name, justify="right")
    for row in fig15["rows"]:
        table.add_row(
            token_text(row["context"]),
            str(row["tp_size"]),
            f"{row['ms']['per_sequence']:.1f}",
            *(f"{row['speedup'][name]:.3f}" for name in (*names, "ideal")),
        )
    stated = [
        f"{_SHORT.get(row['sharding'], row['sharding'])} over {_SHORT.get(row['over'], row['over'])} "
        f"{row['speedup']:g}" + (f" at {token_text(row['context'])}" if row["context"] else " (mean)")
        for row in fig15["paper"]
    ]
    table.caption, table.caption_justify = f"The paper: {'; '.join(stated)}", "left"
    return table


def job_tables(job: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The job on 8,192 GPUs."""
    title = f"8,192 GPUs: {job['model']} at {token_text(job['context'])}, {job['split']} (the paper names no model)"
    yield system_table(job["systems"], title)
    plain = job["systems"][BASELINE]["gpu_imbalance"]
    yield Text(
        f"Busiest GPU's computation over the mean under Plain-4D: {plain:.2f} (the paper: "
        f"{job['paper_gpu_imbalance']:.2f}). One step simulated in {job['seconds_8192']:.2f} s."
    )


def explanation_table(rows: Sequence[Row], fig12: Mapping[str, Any]) -> Table:
    """What explains the difference to the paper's mean."""
    table = empty_table("What explains the difference: means of Figure 12 with one assumption swapped")
    table.add_column("assumption")
    for name in (
        "paper's method",
        "without 550M",
        f"over {SYSTEM_LABELS[CUT]}",
        "ours, placed",
        "ours over its, least",
    ):
        table.add_column(name, justify="right")
    for place, row in enumerate(rows):
        cells = [
            row[key] for key in ("paper", "paper_without_550M", "paper_over_cut", "placed", "least_placed_over_paper")
        ]
        shown = ("" if value is None else f"{value:.3f}" for value in cells)
        table.add_row(row["assumption"] + ("*" if row["few"] else ""), *shown, style=None if place else "bold")
    table.caption = (
        f"The paper reports {fig12['paper']['paper']['all']:.2f}. *: Figure 12's mean times what the swap changes on "
        "few steps; another order of the documents shows how far a mean is off by chance. Room for waiting: with the "
        "default ours falls behind where the last column is below 1, and was given more for that reason."
    )
    table.caption_justify = "left"
    return table


def sensitivity_table(rows: Sequence[Row]) -> Table:
    """What every constant a fifth lower and higher changes of the means."""
    table = empty_table("Sensitivity: change of the mean speed-up with one constant x 0.8 / x 1.2")
    table.add_column("constant", no_wrap=True)
    for name in ("paper's method", "ours, placed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it is")
    for row in rows[1:]:
        table.add_row(row["constant"], *changes(row, rows[0]), row["what"])
    return table


def changes(row: Row, base: Row) -> list[str]:
    """What a constant changes of the means of the paper's method and of ours: low / high, on the same few steps.

    >>> base = {"low": {"paper": 1.3, "placed": 1.4}}
    >>> changes({"low": {"paper": 1.28, "placed": 1.4}, "high": {"paper": 1.31, "placed": 1.43}}, base)
    ['-0.020 / +0.010', '+0.000 / +0.030']
    """
    return [
        " / ".join(f"{row[which][name] - base['low'][name]:+.3f}" for which in ("low", "high"))
        for name in ("paper", "placed")
    ]


def column_legend() -> Text:
    """What the columns of ``system_table`` are."""
    return legend(SYSTEM_COLUMNS)


def _data(data: Mapping[str, Any]) -> str:
    return (
        f"{data['name']}: {data['documents']:,} documents, the longest {data['longest']:,} tokens; split at 128K a "
        f"token's document has {data['squared_over_mean']:,.0f} tokens on average"
    )
