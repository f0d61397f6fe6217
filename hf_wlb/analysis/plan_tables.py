"""Rich tables of a plan, for terminals of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_wlb.analysis.tables import empty_table, figure, legend
from hf_wlb.simulator.plan_result import PlanResult, Prediction, Training

CHOICE_COLUMNS = (
    ("split", "GPUs per tensor, context and pipeline parallel group, replicas (FSDP: they share parameters out)"),
    ("R", "activations are recomputed (gradient_checkpointing)"),
    ("tokens/s", "of all GPUs, predicted over a whole pass of documents; then of one GPU"),
    ("MFU", "model FLOPs over the GPUs' bf16 peak"),
    ("GB", "of the GPU that needs most, by the formula of docs/launching.md"),
    ("gain", "tokens/s over Plain-4D (next-fit, per-sequence sharding): on the same split, on its own best split"),
    ("delay", "mean steps that a token waits"),
)
SETTING_COLUMNS = (
    ("m", "micro-batches of a step on each replica"),
    ("S_max", "most tokens of a micro-batch, over the context"),
    ("outliers", "documents from so many tokens on may wait (outlier_tokens)"),
    ("gap", "max_time_gap"),
    ("layers", "of the pipeline stages"),
)

ASSUMPTION = (
    "All of this is predicted, nothing measured. Under FSDP parameters are taken to be gathered, and gradients to be "
    "summed, while layers compute, as far as that takes no longer."
)


def plan_tables(result: PlanResult, model: str, source: str, priced_by: str) -> Iterator[RenderableType]:
    """Everything ``hf-wlb plan`` prints of a plan, top to bottom."""
    tokens = result.micro_batches * result.context_length
    yield Text(f"Model: {model} on {result.gpus:,} GPUs, context {result.context_length:,}")
    yield Text(f"Lengths: {source}")
    yield Text(f"Costs: {priced_by}")
    yield Text(f"Step: {result.micro_batches} micro-batches, {tokens:,} tokens on all replicas, the same for every way")
    yield choice_table(result)
    yield legend(CHOICE_COLUMNS)
    yield setting_table(result)
    yield legend(SETTING_COLUMNS)
    yield trial_table(result)
    yield from _schedules(result)
    yield Text(searched_text(result))
    yield Text(ASSUMPTION, "dim")
    yield Text(summary_text(result), "bold green")


def choice_table(result: PlanResult) -> Table:
    """One row per split, then Plain-4D on its best one; see ``CHOICE_COLUMNS``."""
    table = empty_table(f"The best of {result.searched.ways:,} ways, predicted")
    table.add_column("split", no_wrap=True)
    table.add_column("R", no_wrap=True)
    for name in ("tokens/s", "a GPU", "MFU", "GB", "gain", "best", "delay"):
        table.add_column(name, justify="right", no_wrap=True)
    for choice in result.choices:
        gains = (f"{choice.gain:.2f}x", f"{result.gain_over_best_plain(choice):.2f}x")
        table.add_row(*_figures(choice.prediction, *gains), style="bold green" if choice is result.best else None)
    table.add_section()
    table.add_row(*_figures(result.plain, "Plain-4D", "1.00x"))
    return table


def _figures(found: Prediction, *gains: str) -> tuple[str, ...]:
    candidate = found.training.candidate
    return (
        candidate.split.label,
        "R" if candidate.gradient_checkpointing else "",
        f"{found.tokens_per_second:,.0f}",
        f"{found.tokens_per_second_per_gpu:,.0f}",
        f"{found.mfu:.1%}",
        f"{found.memory_bytes / 1e9:.0f}",
        *gains,
        f"{found.delay:.2f}",
    )


def setting_table(result: PlanResult) -> Table:
    """How each of them is trained; see ``SETTING_COLUMNS``."""
    table = empty_table("Their settings (packer steady, schedule 1F1B)")
    table.add_column("split", no_wrap=True)
    for name in ("m", "S_max", "outliers", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sharding", no_wrap=True)
    table.add_column("layers")
    for choice in result.choices:
        training = choice.prediction.training
        table.add_row(
            training.split.label,
            str(training.micro_batches_per_replica),
            f"{training.memory_factor:.4g}",
            f"{training.outlier_tokens:,}",
            f"{training.max_time_gap:g}",
            training.sharding if training.split.cp_size > 1 else "none",
            _layers(training.stage_layers),
            style="bold green" if choice is result.best else None,
        )
    return table


def _layers(sizes: tuple[int, ...]) -> str:
    """Runs of equal numbers put together.

    >>> _layers((9, 9, 8, 6)), _layers((32,))
    ('2 x 9, 8, 6', '32')
    """
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        else:
            runs.append((1, size))
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def trial_table(result: PlanResult) -> Table:
    """What changing one setting does, on the split on which they were tried."""
    first = result.trials[0]
    table = empty_table(f"Settings tried on {first.training.label}; the first: {_setting(first.training)}")
    table.add_column("changed", no_wrap=True)
    for name in ("tokens/s", "of the first", "GB", "delay", "variation"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(result.trials, key=lambda trial: trial.tokens_per_second)
    for trial in result.trials:
        table.add_row(
            _setting(trial.training, first.training) or "nothing",
            f"{trial.tokens_per_second:,.0f}",
            f"{trial.tokens_per_second / first.tokens_per_second:.3f}",
            f"{trial.memory_bytes / 1e9:.0f}",
            f"{trial.delay:.2f}",
            f"{trial.token_variation:.3f}",
            style="bold" if trial is best else None,
        )
    return table


def _setting(training: Training, than: Training | None = None) -> str:
    """Settings in words, those that are others ``than`` of another training."""
    values = {
        "max_tokens_per_micro_batch": f"S_max {training.memory_factor:.4g}",
        "outlier_tokens": f"outliers {training.outlier_tokens:,}",
        "max_time_gap": f"gap {training.max_time_gap:g}",
        "sharding": training.sharding,
    }
    if training.split.cp_size == 1:
        del values["sharding"]
    return ", ".join(
        text for name, text in values.items() if than is None or getattr(training, name) != getattr(than, name)
    )


def _schedules(result: PlanResult) -> Iterator[RenderableType]:
    if result.schedules:
        same = next(c.prediction for c in result.choices if c.prediction.training.split.pp_size > 1)
        table = empty_table(f"Other schedules on {same.training.label}, predicted; this library runs 1F1B")
        table.add_column("schedule", no_wrap=True)
        for name in ("tokens/s", "over 1F1B", "GB"):
            table.add_column(name, justify="right", no_wrap=True)
        for found in (same, *result.schedules):
            schedule = found.training.schedule
            cut = {"interleaved": f", {schedule.model_chunks} model chunks", "seq1f1b": f", {schedule.pieces} pieces"}
            table.add_row(
                schedule.name + cut.get(schedule.name, ""),
                f"{found.tokens_per_second:,.0f}",
                f"{found.tokens_per_second / same.tokens_per_second:.3f}x",
                f"{found.memory_bytes / 1e9:.0f}{' (too much)' if found.memory_bytes > result.memory_limit else ''}",
            )
        yield table
    for note in result.schedule_notes:
        yield Text(f"Schedules: {note}", "dim")


def searched_text(result: PlanResult) -> str:
    """What was looked at, in a sentence or two."""
    searched = result.searched
    dropped = "".join(f"; {count:,} left out: {reason}" for reason, count in searched.dropped.items())
    rest = (
        "every other one could reach less at best"
        if searched.all_bounded
        else "the likely ones first; others could be about as fast"
    )
    return (
        f"Searched: {searched.ways:,} ways{dropped}. {searched.simulated} were simulated, {rest}; under Plain-4D "
        f"{searched.plain_simulated}. Memory: {result.memory_limit / 1e9:.0f} GB a GPU, a tenth stays free."
    )


def summary_text(result: PlanResult) -> str:
    """The plan in a sentence."""
    best, found = result.best, result.best.prediction
    return (
        f"Best: {found.training.label}, {figure(found.tokens_per_second)} tokens/s, {found.step_seconds:.3g} s a step; "
        f"{best.gain:.2f}x over Plain-4D on the same split and {result.gain_over_best_plain(best):.2f}x over Plain-4D "
        f"on its own best one ({result.plain.training.label})."
    )
