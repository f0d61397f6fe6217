"""Searches for the fastest way to train a model on so many GPUs with the documents at hand.

Every way trains the same tokens a step. All splits are priced by means, which bounds what they can reach; in the order
of their bounds they are simulated for a few steps, until no other can be among the best. The best are simulated for
longer, settings of packing and sharding are tried on the fastest of them, and Plain-4D is simulated beside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hf_wlb.lengths import LengthArray
from hf_wlb.simulator.cluster import Cluster
from hf_wlb.simulator.estimates import Estimator
from hf_wlb.simulator.plan_result import Choice, PlanResult, Point, Prediction, Searched
from hf_wlb.simulator.plan_trials import LONG, SHORT, Documents, Stretch, Trials
from hf_wlb.simulator.search_space import (
    MEMORY,
    Bounded,
    Bounder,
    Candidate,
    Sample,
    default_micro_batches,
    enumerate_candidates,
)
from hf_wlb.workload import ProfiledWorkload
from hf_wlb.workload.base import is_whole_number

FREE_SHARE = 0.1
"""Of a GPU's memory that a plan leaves free: the formula for what is needed is a guide."""
_ESTIMATED = 4  # times the splits that are simulated, of which it is estimated which are likely
SLACK = 1.02
"""How much more than its bound a split may reach: steps hold up to so much more than the average tokens."""
_MORE_FINALS = 2  # splits simulated for longer besides those that are kept: the first, short simulation is rough
_HOPELESS = 2.0  # weights, gradients and optimizer states over a GPU's memory, for a split not to be priced
_LOOKED_AT = 12  # splits looked at to say what would fit where nothing does

Tell = Callable[[str], None]
Simulated = tuple[Bounded, Prediction]


@dataclass(frozen=True)
class Effort:
    """How much of everything.

    Attributes:
        most_simulated: Splits to simulate, at most.
        most_plain: The same under Plain-4D, besides the best splits.
        short: Simulated of each split first.
        long: Simulated of the best ones, and of settings.
    """

    most_simulated: int = 16
    most_plain: int = 8
    short: Stretch = SHORT
    long: Stretch = LONG


QUICK = Effort(6, 3, Stretch(64, 16, 4, 1), Stretch(128, 32, 6, 2))
"""Few splits and few steps, to try it out: says little."""


def search(
    config: Any,
    gpus: int,
    lengths: LengthArray,
    context_length: int,
    cluster: Cluster,
    *,
    micro_batches: int | None = None,
    memory_bytes: float | None = None,
    profile: ProfiledWorkload | None = None,
    keep: int = 5,
    effort: Effort | None = None,
    seed: int = 0,
    progress: Tell | None = None,
) -> PlanResult:
    """Finds the fastest ways to train. Pure and deterministic.

    Splits: ``tp_size`` powers of two within a node, ``cp_size``, ``pp_size`` and replicas as they divide, parameters
    shared out (FSDP) or not, activations recomputed or not. Settings: S_max as memory allows, ``outlier_tokens`` and
    ``max_time_gap`` of the packer ``steady``, and the sharding strategy. The pipeline's schedule is 1F1B, which
    ``WLBTrainer`` runs; others are predicted for comparison.

    Args:
        config: A Transformers config, or any object with its attributes.
        gpus: To be used, all of them.
        lengths: Tokens of documents, shape ``(documents,)``; passes over them in random order make the stream.
        context_length: Tokens of a micro-batch on average; longer documents are split at it.
        cluster: Where.
        micro_batches: Of a step on all replicas: every way trains ``micro_batches * context_length`` tokens a step. By
            default see ``default_micro_batches``.
        memory_bytes: Of a GPU; a tenth of it is left free. By default the cluster's.
        profile: Measured costs; then only splits with its ``tp_size`` are looked at.
        keep: So many of the best.
        effort: How much is simulated.
        seed: Of the documents' order.
        progress: Called with what is done next.

    Raises:
        ValueError: A number is below 1, the GPUs do not make whole nodes, the model cannot be counted, there are no
            documents, or no split can be run or fits into memory (it says what would).
    """
    _check(gpus=gpus, context_length=context_length, keep=keep, micro_batches=micro_batches)
    _check_nodes(gpus, cluster.gpus_per_node)
    limit = (cluster.memory_bytes if memory_bytes is None else memory_bytes) * (1 - FREE_SHARE)
    problem = _Problem(config, gpus, lengths, context_length, cluster, micro_batches, limit, profile, seed)
    return _Search(problem, keep, effort or Effort(), progress or (lambda _: None)).run()


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (not is_whole_number(value) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _check_nodes(gpus: int, node: int) -> None:
    if gpus > node and gpus % node:
        fewer, more = gpus // node * node, -(-gpus // node) * node
        raise ValueError(
            f"{gpus} GPUs do not make whole nodes of {node}; give {fewer} or {more} GPUs, or another gpus_per_node."
        )


@dataclass(frozen=True, eq=False)
class _Problem:
    """What is to be planned; see ``search``."""

    config: Any
    gpus: int
    lengths: LengthArray
    context_length: int
    cluster: Cluster
    given_micro_batches: int | None
    limit: float
    profile: ProfiledWorkload | None
    seed: int

    @property
    def micro_batches(self) -> int:
        given = self.given_micro_batches
        return default_micro_batches(self.gpus, self.context_length) if given is None else given

    @property
    def trials(self) -> Trials:
        return Trials(self.context_length, self.micro_batches, self.limit)

    def documents(self, stretch: Stretch) -> Documents:
        return Documents.of(self.lengths, stretch, self.context_length, self.micro_batches, self.seed)

    def candidates(self) -> tuple[list[Candidate], Counter[str]]:
        return enumerate_candidates(
            self.config,
            self.gpus,
            self.cluster,
            context_length=self.context_length,
            micro_batches=self.micro_batches,
            profile=self.profile,
        )

    def bounder(self, sample: Sample) -> Bounder:
        return Bounder(
            self.config,
            self.cluster,
            sample,
            context_length=self.context_length,
            micro_batches=self.micro_batches,
            profile=self.profile,
        )


class _Search:
    def __init__(self, problem: _Problem, keep: int, effort: Effort, tell: Tell) -> None:
        self._problem, self._keep, self._effort, self._tell = problem, keep, effort, tell
        self._trials = problem.trials
        self._short, self._long = problem.documents(effort.short), problem.documents(effort.long)
        self._sample = Sample.of(self._short.lengths, problem.context_length)
        self._estimator = Estimator.of(self._sample, problem.micro_batches)
        self._dropped: Counter[str] = Counter()

    def run(self) -> PlanResult:
        candidates, self._dropped = self._problem.candidates()
        ways = len(candidates) + self._dropped.total()
        if not candidates:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in self._dropped.items())
            raise ValueError(f"None of {ways} ways to train on {self._problem.gpus} GPUs can be run: {reasons}.")
        priced = self._price(candidates)
        fitting = [found for found in priced if self._trials.factors(found)]
        self._dropped[MEMORY] += len(candidates) - len(fitting)
        first, all_bounded = self._promising(fitting)
        if not first:
            raise ValueError(nothing_fits(self._problem))
        finals = self._finals(first)
        tuned, tried = self._trials.tune(*finals[0], self._long, self._tell)
        ranked = self._with_settings(finals, tuned)[: self._keep]
        choices, plain, plain_simulated = self._against_plain(ranked, fitting)
        schedules, notes = self._schedules(ranked)
        return PlanResult(
            choices,
            plain,
            tuple(tried),
            tuple(schedules),
            tuple(notes),
            tuple(self._point(found) for found in priced),
            Searched(ways, dict(+self._dropped), len(first), all_bounded, plain_simulated),
            self._problem.gpus,
            self._problem.micro_batches,
            self._problem.context_length,
            self._problem.limit,
        )

    def _price(self, candidates: list[Candidate]) -> list[Bounded]:
        bounder = self._problem.bounder(self._sample)
        most = _HOPELESS * self._problem.limit
        hopeful = [candidate for candidate in candidates if bounder.states_bytes(candidate) <= most]
        priced = []
        for place, candidate in enumerate(hopeful):
            if place % 16 == 0:
                self._tell(f"bounding {len(candidates):,} ways ({place:,} so far)")
            priced.append(bounder.bound(candidate))
        return priced

    def _promising(self, fitting: list[Bounded]) -> tuple[list[Simulated], bool]:
        """Splits simulated, likely ones first, fastest first, and whether no other could be among the best."""
        by_bound = sorted(fitting, key=lambda bounded: (bounded.seconds, bounded.candidate.label))
        hopeful = by_bound[: self._effort.most_simulated * _ESTIMATED]
        likely = sorted(hopeful, key=lambda bounded: (self._estimator.ours(bounded), bounded.candidate.label))
        found: list[Simulated] = []
        simulated, unknown = 0, False
        for bounded in likely:
            enough = len(found) >= self._keep
            if enough and SLACK * self._at_best(bounded) <= self._least(found):
                continue
            if simulated >= self._effort.most_simulated and found:
                unknown = True
                continue
            simulated += 1
            self._tell(f"simulating {bounded.candidate.label} (number {simulated})")
            prediction = self._trials.first(bounded, self._short)
            if prediction is None:
                self._dropped[MEMORY] += 1
            else:
                found.append((bounded, prediction))
                found.sort(key=_fastest_first)
        others = by_bound[len(hopeful) :]
        unknown |= bool(others) and (len(found) < self._keep or SLACK * self._at_best(others[0]) > self._least(found))
        return found, not unknown

    def _least(self, found: list[Simulated]) -> float:
        """Tokens a second of the last of those that would be kept."""
        return found[self._keep - 1][1].tokens_per_second

    def _finals(self, first: list[Simulated]) -> list[Simulated]:
        finals = []
        for bounded, short in first[: self._keep + _MORE_FINALS]:
            self._tell(f"simulating {bounded.candidate.label} for longer")
            prediction = self._trials.first(bounded, self._long, short.training.memory_factor)
            if prediction is not None:  # else a rare step needs too much memory
                finals.append((bounded, prediction))
        if not finals:
            raise ValueError(nothing_fits(self._problem))
        return sorted(finals, key=_fastest_first)

    def _with_settings(self, finals: list[Simulated], tuned: Prediction) -> list[Simulated]:
        """All splits with what was found on the fastest."""
        (fastest, first), *others = finals
        ranked = [(fastest, tuned)]
        for bounded, own in others:
            self._tell(f"trying these settings on {bounded.candidate.label}")
            ranked.append((bounded, self._trials.with_settings(bounded, own, first, tuned, self._long)))
        return sorted(ranked, key=_fastest_first)

    def _against_plain(
        self, ranked: list[Simulated], fitting: list[Bounded]
    ) -> tuple[tuple[Choice, ...], Prediction, int]:
        """The choices, and Plain-4D on its best split of so many that were simulated."""
        plain: dict[Candidate, Prediction] = {}
        by_estimate = sorted(fitting, key=lambda bounded: (self._estimator.plain(bounded), bounded.candidate.label))
        likely = by_estimate[: self._effort.most_plain]
        for bounded in [*(bounded for bounded, _ in ranked), *likely]:
            if bounded.candidate not in plain:
                self._tell(f"simulating Plain-4D on {bounded.candidate.label}")
                plain[bounded.candidate] = self._trials.plain(bounded, self._long)
        choices = tuple(Choice(own, plain[bounded.candidate], bounded.model) for bounded, own in ranked)
        fits = [found for found in plain.values() if found.memory_bytes <= self._problem.limit]
        best = max(fits or plain.values(), key=lambda found: found.tokens_per_second)
        return choices, best, len(plain)

    def _schedules(self, ranked: list[Simulated]) -> tuple[list[Prediction], list[str]]:
        for bounded, own in ranked:
            if bounded.candidate.split.pp_size > 1:
                self._tell(f"other schedules on {bounded.candidate.label}")
                return self._trials.schedules(bounded, own, self._long)
        return [], ["None of these splits has a pipeline, so there is no schedule to choose."]

    def _at_best(self, bounded: Bounded) -> float:
        """Tokens a second."""
        return self._problem.micro_batches * self._problem.context_length / bounded.seconds

    def _point(self, found: Bounded) -> Point:
        fits = bool(self._trials.factors(found))
        return Point(found.candidate.label, found.memory_bytes, self._at_best(found), fits)


def _fastest_first(simulated: Simulated) -> tuple[float, str]:
    return -simulated[1].tokens_per_second, simulated[0].candidate.label


def nothing_fits(problem: _Problem) -> str:
    """A sentence that says how much too large a model is, and what would help."""
    least = _least_memory(problem)
    assert least is not None, "there are candidates"
    node = problem.cluster.gpus_per_node
    more = [problem.gpus << power for power in range(1, 8)]
    more = sorted({gpus if gpus <= node else -(-gpus // node) * node for gpus in more})
    less = [length for power in range(1, 8) if (length := problem.context_length >> power) >= 1024]
    ways = [f"{found.gpus:,} GPUs" for found in _first_that_fits([replace(problem, gpus=gpus) for gpus in more])]
    ways += [
        f"a context of {found.context_length:,} tokens"
        for found in _first_that_fits([replace(problem, context_length=length) for length in less])
    ]
    return (
        f"Nothing fits: on {problem.gpus:,} GPUs with a context of {problem.context_length:,} tokens the least is "
        f"{least[0] / 1e9:.0f} GB a GPU ({least[1]}), and {problem.limit / 1e9:.0f} GB may be taken (a tenth of the "
        f"memory stays free). {'It would fit with ' + ' or '.join(ways) if ways else 'Take a smaller model'}."
    )


def _first_that_fits(problems: list[_Problem]) -> list[_Problem]:
    """The first, in a list, or none."""
    for problem in problems:
        least = _least_memory(problem)
        if least is not None and least[0] <= problem.limit:
            return [problem]
    return []


def _least_memory(problem: _Problem) -> tuple[float, str] | None:
    """Bytes of a GPU, and the split that needs no more, of the most promising ones."""
    documents = problem.documents(Stretch(1, 1, 1, 1))
    bounder = problem.bounder(Sample.of(documents.lengths, problem.context_length))
    recomputed = [candidate for candidate in problem.candidates()[0] if candidate.gradient_checkpointing]

    def parts(candidate: Candidate) -> tuple[float, int]:
        return bounder.states_bytes(candidate), -candidate.split.cp_size * candidate.split.tp_size

    found = [bounder.bound(candidate) for candidate in sorted(recomputed, key=parts)[:_LOOKED_AT]]
    return min(((problem.trials.memory(bounded, 1.0), bounded.candidate.label) for bounded in found), default=None)
