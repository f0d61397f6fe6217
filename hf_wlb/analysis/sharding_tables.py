"""Rich tables of shards, for terminals of 80 columns, and the headings of their picture."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_wlb.analysis.sharding import ShardAnalysis, StrategyResult
from hf_wlb.analysis.tables import empty_table, figure, legend

STRATEGY_COLUMNS = (
    ("of ideal", "work of the whole micro-batch shared out evenly, nothing lost, over the slowest rank's"),
    ("slowest", "predicted work of the slowest rank, forward and backward of the whole model, exchange included"),
    ("imbalance", "slowest rank over the mean"),
    ("skew", "largest deviation of a rank's tokens from an even share"),
    ("exchanged", "tokens whose keys and values every rank receives in every layer, padding included"),
)
RANK_COLUMNS = (
    ("whole", "documents that lie on the rank alone, and their tokens"),
    ("head, tail", "tokens of its chunks from the front and from the back of documents that are cut"),
    ("attention", "over whole documents + of chunks"),
    ("linear", "work that goes by tokens"),
    ("waiting", "exchange of keys and values, but for the gathers that attention over whole documents hides"),
)
_HOW = {
    "per_sequence": "cut as if it were one document",
    "per_document": "every document cut",
    "placed": "short documents whole, long ones fill the gaps",
}


def work_unit(analysis: ShardAnalysis) -> tuple[float, str]:
    """What to multiply work by, and the unit that it then has."""
    return (1e3, "ms") if analysis.unit == "seconds" else (1.0, "relative units")


def strategy_headings(analysis: ShardAnalysis) -> Iterator[tuple[str, str, StrategyResult]]:
    """What a picture says over each strategy's tokens and over its work; ``adaptive`` is the one it chose."""
    scale, unit = work_unit(analysis)
    chosen = analysis.chosen.plan.digest()
    for name, how in _HOW.items():
        result = analysis.results[name]
        mark = ", adaptive's choice" if result.plan.digest() == chosen else ""
        slowest = f"slowest rank {_work(result.plan.slowest, scale)} {unit}"
        yield f"{name}{mark}: {how}", f"{slowest}, {result.share_of_ideal:.0%} of ideal", result


def shard_tables(analysis: ShardAnalysis, source: str, priced_by: str) -> Iterator[RenderableType]:
    """Everything ``hf-wlb shard`` prints, top to bottom."""
    scale, unit = work_unit(analysis)
    yield Text(f"Micro-batch: {source}")
    yield Text(f"Workload: {priced_by}")
    ranks = f"{analysis.cp_size} context-parallel rank{'s' if analysis.cp_size > 1 else ''}"
    yield Text(f"Layout: {ranks}; ideal {_work(analysis.ideal, scale)} {unit} a rank")
    yield strategy_table(analysis)
    yield legend(STRATEGY_COLUMNS)
    yield token_table(analysis)
    yield chosen_table(analysis)
    yield legend(RANK_COLUMNS)
    chosen = analysis.chosen
    gains = ", ".join(
        f"{analysis.results[name].plan.slowest / chosen.plan.slowest:.2f}x over {name}"
        for name in ("per_sequence", "per_document")
        if chosen.plan.slowest
    )
    yield Text(f"adaptive chose {chosen.plan.strategy}: {chosen.choice}{'; ' if gains else ''}{gains}.", "bold green")


def strategy_table(analysis: ShardAnalysis) -> Table:
    """One row per strategy; see ``STRATEGY_COLUMNS``."""
    scale, unit = work_unit(analysis)
    table = empty_table("Every strategy")
    table.add_column("strategy", no_wrap=True)
    for column in ("of ideal", f"slowest ({unit.split()[0]})", "imbalance", "skew", "exchanged"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in analysis.results.values():
        table.add_row(
            result.label,
            f"{result.share_of_ideal:.1%}",
            _work(result.plan.slowest, scale),
            f"{result.plan.imbalance:.3f}",
            f"{result.plan.token_skew:.1%}",
            f"{result.exchanged_tokens:,}",
            style="bold" if result.strategy == "adaptive" else None,
        )
    return table


def token_table(analysis: ShardAnalysis) -> Table:
    """Tokens of every rank under every strategy."""
    table = empty_table("Tokens of every rank")
    table.add_column("rank", justify="right")
    for result in analysis.results.values():
        table.add_column(result.strategy, justify="right", no_wrap=True)
    for rank in range(analysis.cp_size):
        table.add_row(str(rank), *(f"{result.ranks[rank].tokens:,}" for result in analysis.results.values()))
    return table


def chosen_table(analysis: ShardAnalysis) -> Table:
    """What every rank holds and does under the plan that ``adaptive`` chose; see ``RANK_COLUMNS``."""
    scale, unit = work_unit(analysis)
    chosen = analysis.chosen
    table = empty_table(f"adaptive's plan, {chosen.plan.strategy}; work in {unit}")
    for column in ("rank", "whole", "head", "tail", "attention", "linear", "waiting", "work"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, rank in enumerate(chosen.ranks):
        table.add_row(
            str(number),
            f"{rank.local_documents:,}: {rank.local_tokens:,}",
            f"{rank.head_tokens:,}",
            f"{rank.tail_tokens:,}",
            f"{_work(rank.local_attention, scale)} + {_work(rank.sharded_attention, scale)}",
            _work(rank.linear, scale),
            _work(rank.waiting, scale),
            _work(rank.workload, scale),
        )
    return table


def _work(work: float, scale: float) -> str:
    return figure(work * scale)
