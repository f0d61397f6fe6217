"""Rich tables of what was found, for terminals of 80 columns. Every column is explained below its table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_wlb.analysis.comparison import Analysis, CaseResult
from hf_wlb.analysis.recommendation import Recommendation
from hf_wlb.argument_names import as_arguments, yaml_value
from hf_wlb.lengths import LengthSummary
from hf_wlb.packing import PackingConfig, TuningPoint, TuningResult

_BAR = 14  # characters of the longest bar of a column

STEP_COLUMNS = (
    ("imbalance", "heaviest micro-batch over the mean one, mean over regular steps"),
    ("step gap", "modelled step time over perfect balance of what the step holds, regular steps"),
    ("delay", "mean steps a token waited, regular steps and what waited when the data ended"),
    ("worst", "longest wait of a document in steps"),
    ("waiting", "tokens held back, mean / peak, in context lengths"),
    ("variation", "standard deviation over mean of the tokens per step"),
)
SET_COLUMNS = (
    ("total time", "modelled time of the whole equal set, flush included, over perfect balance of whole documents"),
    ("tokens/s", "gain in tokens per modelled second over next-fit, whole set"),
    ("lost", "share of tokens whose own document's beginning was cut off"),
    ("work", "workload done, over that of whole documents (up to the context length)"),
    ("plan ms", "median planning time per step, processor time"),
)


def analysis_tables(analysis: Analysis, source: str, priced_by: str, config: PackingConfig) -> Iterator[RenderableType]:
    """What ``hf-wlb analyze`` prints of the comparison, top to bottom."""
    yield from _heading(source, priced_by, config, analysis.crossover_length)
    for note in analysis.notes:
        yield Text(f"Note: {note}", "yellow")
    yield histogram_table(analysis.summary)
    yield step_table(analysis.results, f"Every packer gets the same {analysis.documents:,} documents: its steps")
    yield legend(STEP_COLUMNS)
    yield set_table(analysis.results, f"The whole set of {analysis.tokens:,} tokens")
    yield legend(SET_COLUMNS)
    if any(row.subset for row in analysis.results):
        yield Text("* planned only the first steps' worth of the documents, so no comparison of totals.", "dim")
    yield _gain(analysis, analysis.result("steady"), config)


def recommendation_tables(
    analysis: Analysis, found: Recommendation | None, config: PackingConfig
) -> Iterator[RenderableType]:
    """What ``hf-wlb analyze`` prints of the settings to take, below that; nothing where there are none."""
    if found is None:
        return
    rows = [analysis.result("next-fit"), analysis.result("steady")]
    if found.result not in rows:
        rows.append(found.result)
        yield step_table(rows, "What is recommended, beside the default: steps of the same documents")
        yield set_table(rows, "The whole set")
        yield _gain(analysis, found.result, config)
    yield Text(f"Recommended: {found.description}.", "bold green")
    yield Text(found.reason)
    yield from arguments_block(found.result.config)


def _gain(analysis: Analysis, of: CaseResult, config: PackingConfig) -> Text:
    return Text(
        f"Expected gain of {of.label} on {_layout(config)}: {analysis.speedup('next-fit', of):.2f}x over next-fit, "
        f"{analysis.speedup('concat-and-cut', of):.2f}x over concat-and-cut (which does less attention).",
        "bold",
    )


def tuning_tables(
    result: TuningResult, source: str, priced_by: str, config: PackingConfig, longer: int
) -> Iterator[RenderableType]:
    """Everything ``hf-wlb tune`` prints, top to bottom; ``longer`` documents are above what stays whole."""
    yield from _heading(source, priced_by, config, None)
    if longer:
        yield Text(
            f"Note: {longer:,} documents are longer than {config.longest_document:,} tokens (--max-document-tokens), "
            f"and {'truncated' if config.oversize == 'truncate' else 'split'} there.",
            "yellow",
        )
    shown = {"recommended": result.recommended}
    if result.default is not None and result.default is not result.recommended:
        shown["default"] = result.default
    further = [point for point in result.pareto if point not in shown.values()]
    title = f"{len(result.points)} settings over {result.steps} steps: the recommended, and the best in time or delay"
    yield tuning_table(shown, further, title)
    for packer, point in result.best.items():
        if point not in (*shown.values(), *further):
            gap = (point.time_gap - 1) * 100
            yield Text(f"Best {packer}: {point.description}; {gap:.1f}% over perfect, delay {point.delay:.2f}.")
    yield Text(f"Recommended: {result.recommended.description}.", "bold green")
    yield Text(result.reason)
    yield from arguments_block(result.recommended.config)


def arguments_block(config: PackingConfig) -> Iterator[Text]:
    """The settings as they are given to a trainer or a recipe."""
    yield Text("As arguments of WLBTrainingArguments, or in a recipe's YAML (--yaml writes them):")
    yield Text("\n".join(f"  {line}" for line in arguments_lines(config)), "green")


def arguments_lines(config: PackingConfig) -> list[str]:
    """Lines of YAML, the last of which says for which layout.

    >>> for line in arguments_lines(PackingConfig(8192, micro_batches_per_replica=4, pp_size=2, packer="next-fit")):
    ...     print(line)
    context_length: 8192
    gradient_accumulation_steps: 4
    packer: next-fit
    # for 1 replica of 4 micro-batches a step, 2 pipeline stages: give the layout, too (pp_size, fsdp), and what \
documents cost (workload_profile or workload_crossover)
    """
    layout = (
        f"# for {_layout(config)}: give the layout, too (pp_size, fsdp), and what documents cost (workload_profile or "
        "workload_crossover)"
    )
    return [*(f"{name}: {yaml_value(value)}" for name, value in as_arguments(config).items()), layout]


def _heading(source: str, priced_by: str, config: PackingConfig, crossover: float | None) -> Iterator[RenderableType]:
    yield Text(f"Lengths: {source}")
    at = "" if crossover is None else f" (attention = linear work at {crossover:,.0f} tokens)"
    yield Text(f"Workload: {priced_by}{at if 'attention = ' not in priced_by else ''}")
    yield Text(
        f"Layout: context {config.context_length:,}, {_layout(config)} "
        "(--context, --dp, --micro-batches, --pp: give those that you train with)"
    )


def _layout(config: PackingConfig) -> str:
    replicas = "1 replica" if config.dp_size == 1 else f"{config.dp_size} replicas"
    size, stages = config.micro_batches_per_replica, config.pp_size
    micro_batches = "1 micro-batch" if size == 1 else f"{size} micro-batches"
    pipeline = "no pipeline" if stages == 1 else f"{stages} pipeline stages"
    sharded = ", sharded parameters" if config.step_time.lockstep else ""
    return f"{replicas} of {micro_batches} a step, {pipeline}{sharded}"


def histogram_table(summary: LengthSummary) -> Table:
    """Documents, tokens and attention work by length, one row per doubling."""
    table = empty_table(f"{summary.count:,} documents, {summary.tokens:,} tokens; shares by length")
    for column in ("length", "documents", "tokens", "attention"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tokens", width=_BAR)
    table.add_column("attention", width=_BAR)
    rows = histogram_rows(summary)
    most = [max((shares[which] for _, shares in rows), default=0.0) or 1.0 for which in (1, 2)]
    for label, shares in rows:
        bars = ("█" * round(share / full * _BAR) for share, full in zip(shares[1:], most, strict=True))
        table.add_row(label, *(f"{share:.1%}" for share in shares), *bars)
    typical, long = summary.percentiles.get(50.0, 0), summary.percentiles.get(99.0, 0)
    table.caption = (
        f"mean {summary.mean:,.0f}, median {typical:,}, 99% {long:,}, longest {summary.maximum:,}; "
        f"a token's own document has {summary.squared_over_mean:,.0f} tokens on average"
    )
    table.caption_justify = "left"
    return table


def histogram_rows(summary: LengthSummary) -> list[tuple[str, tuple[float, float, float]]]:
    """Label and shares (documents, tokens, attention) of every doubling of the length; rare short ones together."""
    histogram = summary.histogram
    merged: dict[int, list[float]] = {}
    columns = (histogram.documents, histogram.tokens, histogram.attention_pairs)
    for place, low in enumerate(histogram.edges[:-1]):
        octave = max(int(low).bit_length(), 8)  # below 256 tokens: one row
        sums = merged.setdefault(octave, [0.0, 0.0, 0.0])
        for which, column in enumerate(columns):
            sums[which] += column[place]
    totals = [max(float(sum(column)), 1.0) for column in columns]
    rows = []
    for octave in sorted(merged):
        low, high = (0 if octave == 8 else 1 << (octave - 1)), 1 << octave
        shares = [value / total for value, total in zip(merged[octave], totals, strict=True)]
        rows.append((f"{_short(low)} - {_short(high)}", (shares[0], shares[1], shares[2])))
    return rows


def step_table(results: Sequence[CaseResult], title: str) -> Table:
    """What a packer's steps are like, one row each; see ``STEP_COLUMNS``."""
    table = _packer_table(title, STEP_COLUMNS)
    for row in results:
        report = row.report
        regular = report.steps > 0  # in a very short run a packer may have read everything in its first step
        _add(
            table,
            row,
            f"{report.imbalance:.3f}" if regular else "",
            f"{report.time_gap:.3f}" if regular else "",
            f"{report.delay:.2f}" if regular else "",
            str(report.delay_worst),
            f"{report.waiting_mean_contexts:.1f} / {report.waiting_peak_contexts:.1f}",
            f"{report.token_variation:.3f}" if regular else "",
        )
    return table


def set_table(results: Sequence[CaseResult], title: str) -> Table:
    """What training the whole set takes, one row each; see ``SET_COLUMNS``."""
    table = _packer_table(title, SET_COLUMNS)
    baseline = next((row for row in results if row.config.packer == "next-fit"), None)
    for row in results:
        compared = baseline is not None and not row.subset
        _add(
            table,
            row,
            "" if row.subset else f"{row.time_over_perfect:.3f}",
            f"{(baseline.time_per_token / row.time_per_token - 1) * 100:+.1f}%" if baseline and compared else "",
            f"{row.report.context_lost:.1%}",
            f"{row.work_share:.1%}",
            f"{row.report.plan_ms:.2f}",
        )
    return table


def _packer_table(title: str, columns: Iterable[tuple[str, str]]) -> Table:
    table = empty_table(title)
    table.add_column("packer", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, row: CaseResult, *cells: str) -> None:
    label = row.label + ("*" if row.subset else "")
    table.add_row(label, *cells, style="bold" if row.config.packer == "steady" else None)


def empty_table(title: str) -> Table:
    """A table without columns, as all of ours look."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def tuning_table(named: Mapping[str, TuningPoint], further: Iterable[TuningPoint], title: str) -> Table:
    """One row per setting, those with a name first."""
    table = empty_table(title)
    table.add_column("setting")
    for name in ("time gap", "delay", "worst", "waiting", "variation"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [*((f"{name}: {point.description}", point) for name, point in named.items())]
    for description, point in [*rows, *((point.description, point) for point in further)]:
        table.add_row(
            description,
            f"{point.time_gap:.3f}",
            f"{point.delay:.2f}",
            str(point.delay_worst),
            f"{point.waiting_mean_contexts:.1f} / {point.waiting_peak_contexts:.1f}",
            f"{point.token_variation:.3f}",
            style="bold green" if description.startswith("recommended") else None,
        )
    return table


def legend(columns: Iterable[tuple[str, str]]) -> Text:
    """What each column is."""
    return Text("\n".join(f"  {name}: {meaning}" for name, meaning in columns), "dim")


def figure(value: float) -> str:
    """A number with three digits or more.

    >>> figure(0.012345), figure(12.345), figure(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.1f}" if value >= 10 or not value else f"{value:.3g}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)
