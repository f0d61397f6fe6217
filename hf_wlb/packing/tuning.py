"""Settings for given data: tries packers on a simulated stream of lengths and recommends one setting.

The paper tunes the outlier queue's thresholds on a sample of lengths by measuring imbalance and per-token delay and
prints none. Here modelled step time takes the place of imbalance, and S_max is chosen as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Protocol

import numpy as np

from hf_wlb.lengths import IntArray, LengthArray, RandomOrder, StoredOrder
from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.metrics import measure
from hf_wlb.packing.planner import StepPlanner
from hf_wlb.packing.reader import ArraySource
from hf_wlb.packing.tuning_result import Limits, TuningPoint, TuningResult, choose, pareto_front
from hf_wlb.workload import WorkloadModel

#: S_max over the context length, the values tried.
MEMORY_FACTORS = (1.0, 1.125, 1.25, 1.5, 2.0)
#: ``max_time_gap`` of ``steady``, the values tried.
TIME_GAPS = (0.01, 0.02, 0.03, 0.05, 0.08)
#: ``max_waiting_contexts`` of ``steady``, the values tried, in multiples of its default.
WAITING_MULTIPLES = (0.5, 1.0, 2.0)

_CONTEXT_SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
_PERCENTILES = (97.0, 98.0, 99.0, 99.5, 99.8)
_LEAST_RATIO = 1.15  # between two thresholds that are worth telling apart
_LEAST_PAIR_RATIO = 1.5  # between the two levels of a pair
_PAIRS_EXTENDED = 6  # two-level settings that get a third level
_CARRIED_OVER = 4  # settings that are tried with every S_max
_SEARCH_FACTOR = {"wlb": 1.5, "steady": 1.25}  # S_max while the other settings are searched


class Mapper(Protocol):
    """``map`` or ``Executor.map``: applies a function to every item, results in order."""

    def __call__(
        self, function: Callable[[PackingConfig], TuningPoint], items: Sequence[PackingConfig], /
    ) -> Iterable[TuningPoint]:
        """Apply ``function`` to every item."""
        ...


def length_stream(lengths: LengthArray, tokens: int, seed: int = 0, *, first_pass_stored: bool = False) -> IntArray:
    """Draws documents until they have ``tokens`` tokens: passes over ``lengths``, each in a random order of its own.

    Args:
        lengths: Integer array of shape [documents]; may be a memory map, of which only what is drawn is read.
        tokens: Tokens wanted; the last document may exceed them.
        seed: Of the orders.
        first_pass_stored: Read the first pass as stored.

    Returns:
        int64 lengths in reading order, shape [documents drawn]; empty documents among them are left out.

    Raises:
        ValueError: There is no document with tokens.

    >>> length_stream(np.array([3, 0, 3]), 7).tolist()
    [3, 3, 3]
    """
    blocks: list[IntArray] = []
    drawn = 0
    for block in _blocks(lengths, seed, first_pass_stored):
        block = block[block > 0]
        sums = drawn + np.cumsum(block)
        if len(block) and sums[-1] >= tokens:
            return np.concatenate([*blocks, block[: int(np.searchsorted(sums, tokens)) + 1]])
        blocks.append(block)
        drawn = int(sums[-1]) if len(block) else drawn
    raise ValueError(
        "there is no document with tokens among the lengths, so there is nothing to simulate; give at least one length "
        "of 1 or more"
    )


def _blocks(lengths: LengthArray, seed: int, first_pass_stored: bool) -> Iterator[IntArray]:
    """Endless unless the first pass brings no tokens."""
    epoch, tokens, size = 0, 0, 1 << 14
    while epoch == 0 or tokens:
        stored = first_pass_stored and epoch == 0
        order = StoredOrder(len(lengths)) if stored else RandomOrder(len(lengths), seed, epoch)
        for start in range(0, len(lengths), size):
            block = np.asarray(lengths[order.block(start, min(start + size, len(lengths)))], dtype=np.int64)
            tokens += int(block.sum())
            yield block
        epoch += 1


def threshold_candidates(lengths: LengthArray, context_length: int) -> list[int]:
    """Lower bounds of an outlier level that are worth trying: shares of the context and percentiles of the data.

    >>> threshold_candidates(np.array([100] * 99 + [6000]), 8192)
    [512, 1024, 1536, 2048, 3072, 4096, 5120]
    """
    sample = np.asarray(lengths[: 1 << 20], dtype=np.int64)
    longest = int(sample.max(initial=0))
    wanted = [round(share * context_length) for share in _CONTEXT_SHARES]
    if len(sample):
        wanted += [round(float(value)) for value in np.percentile(sample, _PERCENTILES, method="higher")]
    usable = sorted({t for t in wanted if max(context_length // 32, 1) <= t < min(longest, context_length)})
    kept: list[int] = []
    for threshold in usable:
        if not kept or threshold >= kept[-1] * _LEAST_RATIO:
            kept.append(threshold)
    return kept or [max(context_length // 4, 1)]


def tune(
    lengths_sample: LengthArray,
    workload: WorkloadModel,
    config: PackingConfig,
    *,
    max_delay: float = 1.0,
    max_token_variation: float | None = None,
    packers: Sequence[str] = ("wlb", "steady"),
    steps: int | None = None,
    seed: int = 0,
    mapper: Mapper = map,
    progress: Callable[[int], None] | None = None,
) -> TuningResult:
    """Chooses packer settings for data that ``lengths_sample`` represents. Pure and deterministic.

    ``wlb``: thresholds of 1, 2 and 3 levels; ``steady``: ``max_time_gap`` and ``max_waiting_contexts``; both: S_max.
    Recommended is what takes least modelled time among the settings with a mean delay of at most ``max_delay``; of
    those within 0.5% of it, one with the smallest S_max, but none that the default ``steady`` beats in time and delay
    at once. A setting that cuts more documents than ``config`` does, because its S_max is smaller, is never
    recommended: it would only seem faster.

    Args:
        lengths_sample: Lengths in tokens, shape [documents]; passes over it in random order make the stream.
        workload: What a document costs.
        config: Context, layout and policies; its packer settings are replaced. Where it states
            ``max_tokens_per_micro_batch``, no larger S_max is tried.
        max_delay: Mean steps that a token may wait.
        max_token_variation: Most variation of the tokens per step (standard deviation over mean); no limit by default.
        packers: Which of ``wlb`` and ``steady`` to try.
        steps: Steps to simulate with each setting; 3,200 / micro-batches, within 40 to 200, by default.
        seed: Of the stream.
        mapper: Runs the trials; ``ProcessPoolExecutor.map`` runs several at a time, with the same result.
        progress: Called with the number of settings tried so far.

    Raises:
        ValueError: No packer to try, a negative ``max_delay``, a sample without tokens, or documents that the config's
            policies refuse.
    """
    unknown = sorted(set(packers) - {"wlb", "steady"})
    if unknown or not packers:
        raise ValueError(f"packers to tune are wlb and steady, got {list(packers)}; the others have nothing to tune")
    if not max_delay >= 0:
        raise ValueError(f"max_delay is a number of steps of at least 0, got {max_delay}")
    steps = min(max(3200 // config.micro_batches, 40), 200) if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    # Half a step more than is needed: packers that hold documents back have read more than they have trained.
    waiting = 4 * max(10.0, config.micro_batches) * config.context_length
    stream = length_stream(lengths_sample, int((steps + 1) * config.tokens_per_step + waiting), seed)
    limits = Limits(max_delay, max_token_variation, _share_cut_off(stream, replace(config, packer="steady")))
    trials = _Trials(stream, workload, steps, mapper, progress, limits)
    for packer in dict.fromkeys(packers):
        if packer == "wlb":
            _search_wlb(trials, config, threshold_candidates(stream, config.context_length))
        else:
            _search_steady(trials, config)
    points = tuple(trials.points.values())
    comparable = [point for point in points if not limits.cuts_more(point)] or points
    default = trials.points.get(_default_steady(config))
    unbeaten = [point for point in points if default is None or not limits.allow(default) or not default.beats(point)]
    best = {}
    for packer in dict.fromkeys(packers):
        own = [point for point in points if point.config.packer == packer]
        best[packer] = choose([point for point in own if point in unbeaten] or own, limits)[0]
    recommended, reason = choose(unbeaten, limits)
    return TuningResult(points, pareto_front(comparable), best, default, recommended, reason, steps, max_delay)


class _Trials:
    """Settings tried so far; the same one is never tried twice."""

    def __init__(
        self,
        stream: IntArray,
        workload: WorkloadModel,
        steps: int,
        mapper: Mapper,
        progress: Callable[[int], None] | None,
        limits: Limits,
    ) -> None:
        self.points: dict[PackingConfig, TuningPoint] = {}
        self._try = partial(_try_setting, stream, workload, steps)
        self._mapper = mapper
        self._progress = progress
        self._limits = limits

    def run(self, configs: Iterable[PackingConfig]) -> None:
        """Tries those that are new."""
        new = [config for config in dict.fromkeys(configs) if config not in self.points]
        for point in self._mapper(self._try, new):
            self.points[point.config] = point
            if self._progress is not None:
                self._progress(len(self.points))

    def best(self, count: int, packer: str, levels: int | None = None) -> list[PackingConfig]:
        """The most promising settings: those within the limits by time, then the others by delay."""
        chosen = [
            point
            for point in self.points.values()
            if point.config.packer == packer and (levels is None or len(point.config.thresholds or ()) == levels)
        ]
        chosen.sort(key=lambda p: (0.0, p.time_gap) if self._limits.allow(p) else (1.0, p.delay))
        return [point.config for point in chosen[:count]]


def _try_setting(stream: IntArray, workload: WorkloadModel, steps: int, config: PackingConfig) -> TuningPoint:
    report = measure(StepPlanner(ArraySource(stream), workload, config), steps)
    return TuningPoint.of(config, report, _share_cut_off(stream, config))


def _share_cut_off(stream: IntArray, config: PackingConfig) -> float:
    """Share of the tokens that lie beyond what stays whole of their documents.

    >>> _share_cut_off(np.array([4, 16]), PackingConfig(8, 1, max_tokens_per_micro_batch=10))
    0.3
    """
    longest = config.longest_document
    if longest is None:
        return 0.0
    return float(np.maximum(stream - longest, 0).sum() / stream.sum())


def _search_wlb(trials: _Trials, config: PackingConfig, candidates: list[int]) -> None:
    sizes = _memory_sizes(config)
    base = replace(config, packer="wlb", max_tokens_per_micro_batch=_search_size(sizes, config, "wlb"))

    def with_levels(levels: Iterable[tuple[int, ...]]) -> list[PackingConfig]:
        return [replace(base, thresholds=thresholds) for thresholds in levels]

    trials.run(with_levels((t,) for t in candidates))
    trials.run(with_levels((a, b) for a, b in combinations(candidates, 2) if b >= a * _LEAST_PAIR_RATIO))
    pairs = [setting.thresholds or () for setting in trials.best(_PAIRS_EXTENDED, "wlb", levels=2)]
    triples = [tuple(sorted({*pair, t})) for pair in pairs for t in candidates if t not in pair]
    trials.run(with_levels(triples))
    _try_sizes(trials, "wlb", sizes)


def _search_steady(trials: _Trials, config: PackingConfig) -> None:
    sizes = _memory_sizes(config)
    base = replace(
        config,
        packer="steady",
        thresholds=None,
        max_waiting_contexts=None,
        max_tokens_per_micro_batch=_search_size(sizes, config, "steady"),
    )
    default = _waiting_contexts(base)
    trials.run(
        replace(base, max_time_gap=gap, max_waiting_contexts=round(multiple * default, 1))
        for gap in TIME_GAPS
        for multiple in WAITING_MULTIPLES
    )
    trials.run([_default_steady(config)])
    _try_sizes(trials, "steady", sizes)


def _default_steady(config: PackingConfig) -> PackingConfig:
    """What is trained with if nothing is tuned, written as the settings that are tried."""
    usual = replace(config, packer="steady", thresholds=None, max_waiting_contexts=None)
    return replace(
        usual,
        max_time_gap=PackingConfig.max_time_gap,
        max_waiting_contexts=round(_waiting_contexts(usual), 1),
        max_tokens_per_micro_batch=config.s_max,
    )


def _waiting_contexts(config: PackingConfig) -> float:
    return config.waiting_limit / config.context_length


def _try_sizes(trials: _Trials, packer: str, sizes: list[int]) -> None:
    settings = trials.best(_CARRIED_OVER, packer)
    trials.run(replace(setting, max_tokens_per_micro_batch=size) for setting in settings for size in sizes)


def _memory_sizes(config: PackingConfig) -> list[int]:
    """Values of S_max to try, ascending: no more than the config states, where it states one."""
    sizes = {int(factor * config.context_length) for factor in MEMORY_FACTORS}
    longest = config.max_document_tokens or 0
    limit = config.max_tokens_per_micro_batch
    if limit is not None:
        sizes = {size for size in sizes if size <= limit} | {limit}
    return sorted(size for size in sizes if size >= longest) or [max(longest, config.context_length)]


def _search_size(sizes: list[int], config: PackingConfig, packer: str) -> int:
    return min(sizes, key=lambda size: (abs(size - _SEARCH_FACTOR[packer] * config.context_length), size))
