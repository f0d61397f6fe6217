"""What the end-to-end benchmark's samples come to: estimates, tables, the RESULT line. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from end_to_end_cases import BASELINE, CUT, FIXED, NOT_PLACED, VARIANTS, WLB, K
from numpy.typing import NDArray
from readme_table import between_marks

from hf_wlb.simulator.measured import FEWEST_STEPS, MeasuredLaunch, interval_of, read_rounds, without_each
from hf_wlb.simulator.paper import FIGURE_13, FIGURE_14
from hf_wlb.staging.simulation import slot

BEGIN, END = "<!-- end-to-end-table:begin -->", "<!-- end-to-end-table:end -->"
USUAL_MICRO_BATCHES = 8
KERNELS = {"flash-attn-2": "fa2", "flash-attn-4": "fa4"}
#: What others are compared with: the better one of these.
COMPARED = (
    ((BASELINE,), "speedup"),
    ((CUT,), "speedup_vs_concat_cut"),
    ((FIXED, "fixed-4d, per-sequence"), "speedup_vs_fixed"),
)
#: The paper's speed-ups of a 7B model over its Plain-4D: Fig. 13 (128K), by variant. It shares out by sequence or by
#: document, and places none.
PAPER_PARTS = {NOT_PLACED if name == "all" else name: f"{speedup:.2f}" for name, speedup in FIGURE_13.items()}
_PAPER_PARTS_SAID = (
    "The paper's are of 7B-128K with TP8, CP2 and PP4, packed by its Algorithm 1 where here it is `steady`; its whole "
    "method is compared with `wlb, not placed`, because it shares micro-batches out by sequence or by document alone."
)

#: What the results hold, in words.
COLUMNS = {
    "seconds": "of a step, all ranks beginning together, to the end of the slowest: micro-batches to the device, "
    "forward, backward, clipping, optimizer; micro-batches are collated before",
    "predicted": "seconds of the step as the simulator has it, by what predicted_by says",
    "workload": "of a launch: the cost model that its steps were planned and shared out by",
    "micro_batch_lengths": "of the documents, replica by replica, micro-batch by micro-batch, in layout order",
    "spans": "begin and end of every forward and backward, rank by rank, seconds from the step's beginning, in the "
    "order in which 1F1B runs them",
    "plan_seconds, shard_seconds": "time that one rank took to pack the step, and to plan its shards",
    "pass_...": "over the whole stream, beginning and end included: the same documents for all variants",
    "window": "steps that are sampled at random, in rounds in which every variant runs one",
    "tokens_per_second_per_gpu": "tokens over seconds of the sampled steps",
    "scale": "seconds over predicted of the sampled steps",
    "stream_seconds": "scale x predicted of the whole stream",
    "stream_tokens_per_second_per_gpu": "tokens over (scale x predicted) of the whole stream",
    "speedup": "of stream_tokens_per_second_per_gpu over Plain-4D's of the same launch: equal documents, and the "
    "luck of the draw, which steps were sampled, mostly cancels; speedup_sampled: of tokens_per_second_per_gpu",
    "..._interval": "95%, by leaving out each round in turn (jackknife, Student's t); none for fewer than 3",
    "imbalance": "a rank's longest micro-batch, forward and backward, over its mean one; mean over ranks and steps",
    "rank_imbalance": "the busiest rank's forwards and backwards over the mean rank's, waiting between them left out",
    "busy": "share of the step that a stage's ranks compute",
}

Figures = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch.

    Attributes:
        about: Its line, see ``end_to_end_run.launch_line``.
        rounds: Its complete rounds: the step of every variant by name.
    """

    about: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Mapping[str, Any]]]

    @property
    def variants(self) -> list[str]:
        """Those that were run."""
        return list(self.about["streams"])

    def column(self, variant: str, name: str) -> Figures:
        """A figure of every round's step."""
        return np.array([steps[variant][name] for steps in self.rounds], dtype=np.float64)

    @property
    def label(self) -> str:
        """What was run, such as ``pp2dp2cp2_128k_fa4``; with another number of micro-batches than 8 that, too."""
        settings = self.about["settings"]
        axes = {"pp": settings["pp_size"], "dp": self.about["replicas"]}
        axes |= {"cp": settings["cp_size"], "tp": settings["tp_size"]}
        sizes = "".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)
        kernel = KERNELS.get(self.about["kernel"], self.about["kernel"])
        more = "" if settings["micro_batches"] == USUAL_MICRO_BATCHES else f"_m{settings['micro_batches']}"
        return f"{sizes or 'dp'}_{settings['context_length'] / K:g}k_{kernel}{more}"


def on_each_replica(about: Mapping[str, Any]) -> str:
    """What a sentence on a launch's micro-batches goes on with, if it has several replicas."""
    return f" on each of {about['replicas']} replicas" if about["replicas"] > 1 else ""


def other_micro_batches(launch: MeasuredLaunch) -> str:
    """What stands behind a launch's label, if its steps have another number of them than usual."""
    (count,) = {len(own) for variant in launch.variants for step in variant.steps for own in step.plan.replicas}
    return "" if count == USUAL_MICRO_BATCHES else f", {count} micro-batches"


def _on_stages(about: Mapping[str, Any]) -> str:
    sizes = about.get("stage_layers", ())
    return f" on stages of {', '.join(map(str, sizes))}" if sizes else ""


def read_launches(text: str) -> list[Launch]:
    """Reads the lines of a results file; steps of rounds that are not complete are left out.

    Raises:
        ValueError: If a step's launch has no line before it.
    """
    return [Launch(about, rounds) for about, rounds in read_rounds(text)]


def rounds_done(launches: Iterable[Launch], settings: Mapping[str, Any], replicas: int) -> int:
    """The first round that no launch with these settings, on so many replicas, has completed."""
    done = [
        int(next(iter(steps.values()))["round"]) + 1
        for launch in launches
        if launch.about["settings"] == settings and launch.about["replicas"] == replicas
        for steps in launch.rounds
    ]
    return max(done, default=0)


# ---- estimates ----


def estimate(values: Figures) -> tuple[float, list[float] | None]:
    """The value of all rounds (the first) and its 95% interval, by those without one round each."""
    interval = interval_of(values)
    return round(float(values[0]), 4), None if interval is None else [round(end, 4) for end in interval]


def speeds(launch: Launch, variant: str) -> tuple[Figures, Figures]:
    """Tokens per second and device, of all rounds and without each: of the sampled steps, and of the whole stream."""
    seconds, tokens, predicted = (
        without_each(launch.column(variant, name)) for name in ("seconds", "tokens", "predicted")
    )
    stream, devices = launch.about["streams"][variant], launch.about["devices"]
    with np.errstate(divide="ignore", invalid="ignore"):  # one round, and none without it
        sampled = tokens / seconds / devices
        whole = stream["pass_tokens"] / (seconds / predicted * stream["pass_predicted"]) / devices
    return sampled, whole


def order_of(micro_batches: int, pp_size: int, stage: int) -> list[tuple[int, bool]]:
    """The order in which a stage runs its micro-batches: (number, whether it is the forward).

    Without a pipeline forward and backward of one come together.

    >>> order_of(3, 2, 0)
    [(0, True), (1, True), (0, False), (2, True), (1, False), (2, False)]
    """
    if pp_size == 1:
        return [(number, True) for number in range(micro_batches)]
    slots = (slot(stage, step, pp_size) for step in range(2 * (micro_batches + pp_size - 1)))
    return [(number, forward) for number, forward in slots if 0 <= number < micro_batches]


def rank_spans(launch: Launch, step: Mapping[str, Any], rank: int) -> list[tuple[int, bool, float, float]]:
    """A rank's (micro-batch, whether it is the forward, begin, end) in a step."""
    settings, moments = launch.about["settings"], step["spans"][rank]
    order = order_of(settings["micro_batches"], settings["pp_size"], launch.about["stage_of_rank"][rank])
    pairs = zip(order, moments[::2], moments[1::2], strict=True)
    return [(number, forward, begin, end) for (number, forward), begin, end in pairs]


def micro_batch_seconds(launch: Launch, step: Mapping[str, Any]) -> Figures:
    """What every micro-batch took, forward and backward, ``[ranks, micro-batches]``."""
    found = np.zeros((len(step["spans"]), launch.about["settings"]["micro_batches"]))
    for rank in range(len(found)):
        for number, _, begin, end in rank_spans(launch, step, rank):
            found[rank, number] += end - begin
    return found


def busy_figures(launch: Launch, variant: str) -> dict[str, Any]:
    """What the spans say."""
    taken = np.stack([micro_batch_seconds(launch, steps[variant]) for steps in launch.rounds])  # [round, rank, micro]
    ranks = taken.sum(axis=2)
    stages = np.array(launch.about["stage_of_rank"])
    shares = ranks.sum(axis=0) / launch.column(variant, "seconds").sum()
    return {
        "imbalance": round(float((taken.max(axis=2) / taken.mean(axis=2)).mean()), 4),
        "rank_imbalance": round(float((ranks.max(axis=1) / ranks.mean(axis=1)).mean()), 4),
        "busy": [round(float(shares[stages == stage].mean()), 4) for stage in range(int(stages.max()) + 1)],
        "busy_seconds": [round(float(mean), 4) for mean in ranks.mean(axis=0)],
    }


def variant_row(launch: Launch, variant: str) -> dict[str, Any]:
    """A variant's figures in a launch with at least one complete round; speed-ups where Plain-4D ran in it."""
    stream, devices = launch.about["streams"][variant], launch.about["devices"]
    sampled, whole = speeds(launch, variant)
    seconds, predicted = launch.column(variant, "seconds"), launch.column(variant, "predicted")
    scale = float(seconds.sum() / predicted.sum())
    peak = launch.about["peak_flops"]
    row: dict[str, Any] = {"rounds": len(seconds), "step_seconds": round(float(seconds.mean()), 4)}
    for name, values in (
        ("tokens_per_second_per_gpu", sampled),
        ("stream_tokens_per_second_per_gpu", whole),
    ):
        row[name], row[f"{name}_interval"] = estimate(values)
    row |= {
        "scale": scale,
        "stream_predicted": stream["pass_predicted"],
        "stream_seconds": round(scale * stream["pass_predicted"], 2),
        "mfu": round(float(launch.column(variant, "flops").sum()) / float(seconds.sum()) / devices / peak, 4)
        if peak
        else None,
        "peak_gib": max((max(steps[variant]["peak_gib"]) for steps in launch.rounds), default=0.0),
        "planning_share": round(
            float((launch.column(variant, "plan_seconds") + launch.column(variant, "shard_seconds")).sum())
            / float(seconds.sum()),
            5,
        ),
        **busy_figures(launch, variant),
    }
    for others, name in COMPARED:
        known = [other for other in others if other in launch.variants]
        if not known or (variant in known and name != "speedup"):
            continue
        other = max(known, key=lambda other: float(speeds(launch, other)[1][0]))
        theirs, their_whole = speeds(launch, other)
        row[name], row[f"{name}_interval"] = estimate(whole / their_whole)
        row[f"{name}_sampled"], row[f"{name}_sampled_interval"] = estimate(sampled / theirs)
        row[f"{name}_predicted"] = round(launch.about["streams"][other]["pass_predicted"] / stream["pass_predicted"], 4)
    return row


def best_launches(launches: Iterable[Launch]) -> dict[str, Launch]:
    """By label the launch with the most rounds, of several the last; those without a whole round are left out.

    Of launches that differ in the model's layers the one with the most rounds has the label; others of at least
    ``FEWEST_STEPS`` have their layers added, such as ``pp2_128k_fa2_5l``.
    """
    found: dict[str, dict[int, Launch]] = {}
    for launch in launches:
        if not launch.rounds:
            continue
        of_layers, layers = found.setdefault(launch.label, {}), launch.about["settings"]["layers"]
        if layers not in of_layers or len(launch.rounds) >= len(of_layers[layers].rounds):
            of_layers.pop(layers, None)  # in the order of the last ones
            of_layers[layers] = launch
    best: dict[str, Launch] = {}
    for label, of_layers in found.items():
        *others, most = sorted(of_layers.items(), key=lambda item: len(item[1].rounds))
        best[label] = most[1]
        further = [(layers, launch) for layers, launch in reversed(others) if len(launch.rounds) >= FEWEST_STEPS]
        best |= {f"{label}_{layers}l": launch for layers, launch in further}
    return best


def summary(launches: Iterable[Launch]) -> dict[str, dict[str, dict[str, Any]]]:
    """Every variant's figures by label; ratios are formed within one launch only."""
    return {
        label: {variant: variant_row(launch, variant) for variant in launch.variants}
        for label, launch in best_launches(launches).items()
    }


def result(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, float | None]:
    """The RESULT line: WLB's speed-ups by label, and of the labels with 8 micro-batches the least favourable ones."""
    rows = {label: variants[WLB] for label, variants in figures.items() if WLB in variants}
    found: dict[str, float | None] = {
        f"speedup_{label}": row["speedup"] for label, row in rows.items() if "speedup" in row
    }
    usual = [row for label, row in rows.items() if "_m" not in label]
    for name in ("speedup_vs_concat_cut", "speedup_vs_fixed"):
        found[name] = min((row[name] for row in usual if name in row), default=None)
    found["mfu"] = max((row["mfu"] for row in rows.values() if row["mfu"] is not None), default=None)
    found["planning_share"] = max((row["planning_share"] for row in rows.values()), default=None)
    found["peak_gib"] = max(
        (row["peak_gib"] for variants in figures.values() for row in variants.values()), default=None
    )
    return found


# ---- shown ----


def _with_interval(row: Mapping[str, Any], name: str, digits: int) -> str:
    if row.get(name) is None:
        return "-"
    interval = row[f"{name}_interval"]
    ends = (
        ""
        if interval is None or interval[0] == interval[1]
        else f" ({interval[0]:,.{digits}f}-{interval[1]:,.{digits}f})"
    )
    return f"{row[name]:,.{digits}f}{ends}"


def launch_lines(label: str, variants: Mapping[str, Mapping[str, Any]], same: Mapping[str, str]) -> list[str]:
    """A Markdown table of a launch's variants."""
    lines = [
        f"**{label}**, {rounds_text(next(iter(variants.values()))['rounds'])}",
        "",
        "| variant | tokens/s/GPU, sampled | whole stream | its seconds | speed-up | sampled | predicted | vs cut | "
        "imbalance | busy by stage | MFU | peak GiB | planning |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (variant.name for variant in VARIANTS if variant.name in variants or variant.name in same):
        row = variants[same.get(name, name)]
        cells = (
            name + (f" (= {same[name]})" if name in same else ""),
            _with_interval(row, "tokens_per_second_per_gpu", 0),
            _with_interval(row, "stream_tokens_per_second_per_gpu", 0),
            f"{row['stream_seconds']:,.0f}",
            _with_interval(row, "speedup", 3),
            _with_interval(row, "speedup_sampled", 3),
            f"{row['speedup_predicted']:.3f}" if "speedup_predicted" in row else "-",
            _with_interval(row, "speedup_vs_concat_cut", 3),
            f"{row['imbalance']:.3f}",
            " ".join(f"{share:.0%}" for share in row["busy"]),
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_gib']:.0f}",
            f"{row['planning_share']:.2%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rounds_text(count: int) -> str:
    """So many rounds, in words.

    >>> rounds_text(1), rounds_text(3)
    ('1 round', '3 rounds')
    """
    return f"{count} round{'' if count == 1 else 's'}"


def paper_lines(
    launches: Mapping[str, Launch],
    figures: Mapping[str, Mapping[str, Any]],
    label: str = "split, kernel",
    how: str = "",
) -> list[str]:
    """The parts beside the paper's Fig. 13, the contexts beside its Fig. 14; what was not measured has no table.

    Args:
        launches: By label.
        figures: Every variant's, by label.
        label: What labels are, as the tables' head.
        how: What is said of the speed-ups in it, such as ", composed".
    """
    parts, contexts = _part_rows(launches, figures), _context_rows(launches, figures)
    said = [_PAPER_PARTS_SAID, ""] if any(map(_as_the_paper_s, launches.values())) else []
    tables = (
        (f"| {label} | part | speed-up{how} | paper, Fig. 13 |", parts, said),
        (f"| context | {label} | WLB over Plain-4D{how} | paper, Fig. 14 |", contexts, []),
    )
    return [line for head, rows, said in tables if rows for line in (head, "|---|---|---|---|", *rows, "", *said)]


def _part_rows(launches: Mapping[str, Launch], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of the launches in which parts ran: without context parallelism, and of whole systems alone, there are none."""
    rows: list[str] = []
    for label, launch in launches.items():
        own, same = figures[label], launch.about["same_as"]
        run = {name: same.get(name, name) for name in (*PAPER_PARTS, WLB) if same.get(name, name) in own}
        if BASELINE in own and set(run.values()) - {BASELINE, WLB}:
            paper = PAPER_PARTS if _as_the_paper_s(launch) else {}
            for name, measured in run.items():
                speedup = _with_interval(own[measured], "speedup", 3)
                rows.append(f"| {label} | {name} | {speedup} | {paper.get(name, '-')} |")
    return rows


def _as_the_paper_s(launch: Launch) -> bool:
    """Whether it is of the model and context of the paper's Fig. 13."""
    settings = launch.about["settings"]
    return bool(settings["model"] == "7B" and settings["context_length"] == 128 * K)


def _context_rows(launches: Mapping[str, Launch], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows: list[str] = []
    for context, label in sorted((one.about["settings"]["context_length"], label) for label, one in launches.items()):
        if "speedup" in figures[label].get(WLB, {}):
            paper = f"{FIGURE_14[context]:.2f}" if context in FIGURE_14 else "-"
            shown = _with_interval(figures[label][WLB], "speedup", 3)
            rows.append(f"| {context / K:g}K | {label} | {shown} | {paper} |")
    return rows


def results_tables(launches: Sequence[Launch]) -> str:
    """The tables of docs/results.md and what they say.

    Raises:
        ValueError: If there is no launch with a whole round.
    """
    best = best_launches(launches)
    if not best:
        raise ValueError("The results hold no launch with a whole round: run the benchmark first.")
    figures = summary(launches)
    lines: list[str] = []
    for label, launch in best.items():
        about, settings = launch.about, launch.about["settings"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines += [
            *launch_lines(label, figures[label], about["same_as"]),
            "",
            f"A {settings['model']} Llama of {settings['layers'] or 'all its'} layers{_on_stages(about)}, "
            f"{settings['micro_batches']} "
            f"micro-batches of {settings['context_length']:,} tokens a step{on_each_replica(about)}, "
            f"{about['devices']} x {about['device']}, lengths `{settings['lengths']}`. "
            f"{versions}; {about.get('date', '')}, commit {about.get('commit', '')}; `{about.get('command', '')}`.",
            "",
        ]
    return "\n".join([*lines, *paper_lines(best, figures)]).rstrip("\n")


def with_table(page: str, table: str) -> str:
    """The text of docs/results.md with other tables."""
    return between_marks(page, table, BEGIN, END)
