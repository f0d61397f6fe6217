"""What the context-parallel benchmark runs: micro-batches drawn from a file of lengths, and how they are shared out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hf_wlb.lengths import IntArray
from hf_wlb.sharding import Sharder, ShardingConfig, ShardPlan
from hf_wlb.workload import WorkloadModel

K = 1024
CONTEXTS = (64 * K, 128 * K)
LONG = 16 * K  # a micro-batch is "short" if all its documents are under this
SHORT_CAP = 8 * K
THRESHOLDS = (1 * K, 2 * K, 4 * K, 8 * K, 16 * K)
MOST_SEEDS = 1000
MOST_SHRINK = 256  # beyond it the shortest mixes are a few tokens
CAPS = (None, 16 * K, 8 * K, 2 * K)
MAX_TOKEN_SKEW = 0.05

ADAPTIVE, PLACED, PER_SEQUENCE, PER_DOCUMENT = "adaptive", "placed", "per_sequence", "per_document"
COMPARED = (PER_SEQUENCE, PER_DOCUMENT, PLACED)
"""The strategies whose predicted order is compared with the measured one."""


@dataclass(frozen=True)
class Case:
    """One micro-batch.

    Attributes:
        name: What tables call it.
        context: Tokens, before shrinking.
        kind: "short" if all documents are under ``LONG`` tokens, "long" otherwise.
        lengths: Its documents, in drawn order.
        seed: It was drawn with.
    """

    name: str
    context: int
    kind: str
    lengths: tuple[int, ...]
    seed: int | str


@dataclass(frozen=True)
class Draws:
    """Draws micro-batches from lengths.

    Args:
        lengths: All documents' lengths.
        shrink: Divides every length and bound, for trying the program out on a small machine.

    Raises:
        ValueError: If no document is short.
    """

    lengths: IntArray
    shrink: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shrink <= MOST_SHRINK:
            raise ValueError(f"--shrink must be from 1 to {MOST_SHRINK}, got {self.shrink}.")
        cap = self.size(min(cap for cap in CAPS if cap is not None))
        if not bool((self.documents() <= cap).any()):
            raise ValueError(f"No document has {cap:,} tokens or fewer, so mixes of short ones cannot be drawn.")

    def size(self, tokens: int) -> int:
        """So many tokens, shrunk."""
        return max(tokens // self.shrink, 1)

    def documents(self) -> IntArray:
        """The lengths, shrunk."""
        return (self.lengths // self.shrink).clip(min=1)

    def draw(self, tokens: int, seed: int | str, cap: int | None = None) -> list[int]:
        """Documents drawn with replacement until ``tokens`` are full, the last one cut; those above ``cap`` not taken.

        >>> import numpy as np
        >>> Draws(np.array([300, 500])).draw(1000, seed=1)
        [300, 300, 400]
        """
        rng, documents = random.Random(seed), self.documents().tolist()
        drawn: list[int] = []
        left = tokens
        while left:
            length = rng.choice(documents)
            if cap is not None and length > cap:
                continue
            drawn.append(min(length, left))
            left -= drawn[-1]
        return drawn

    def mix(self, context: int, kind: str, count: int) -> list[Case]:
        """The first ``count`` seeds whose draw is of that kind.

        Raises:
            ValueError: If too few of many seeds are.
        """
        cases: list[Case] = []
        tokens, limit = self.size(context), self.size(LONG)
        for seed in range(1, MOST_SEEDS + 1):
            lengths = self.draw(tokens, seed)
            if (max(lengths) >= limit) == (kind == "long"):
                cases.append(Case(f"{context // K}K mix, {kind}, seed {seed}", context, kind, tuple(lengths), seed))
            if len(cases) == count:
                return cases
        raise ValueError(
            f"Of {MOST_SEEDS} draws of {tokens:,} tokens fewer than {count} had "
            f"{'a document' if kind == 'long' else 'only documents'} "
            f"{'of at least' if kind == 'long' else 'under'} {limit:,} tokens. Give lengths of more variety."
        )

    def made_up(self, name: str, context: int, long: int, seed: int) -> Case:
        """One long document (0 for none) and short ones."""
        first = [self.size(long)] if long else []
        lengths = first + self.draw(self.size(context) - sum(first), seed, self.size(SHORT_CAP))
        return Case(name, context, "long" if long else "short", tuple(lengths), seed)

    def cases(self, quick: bool) -> list[Case]:
        """All that are compared with the ideal."""
        long_and_short = self.made_up("128K: 90,000 + short", 128 * K, 90_000, 5)
        if quick:
            return [*self.mix(128 * K, "short", 1), *self.mix(128 * K, "long", 1), long_and_short]
        mixes = [
            case
            for context, count in ((64 * K, 2), (128 * K, 3))
            for kind in ("short", "long")
            for case in self.mix(context, kind, count)
        ]
        return [
            *mixes,
            self.made_up("64K: 49,152 + short", 64 * K, 49_152, 4),
            long_and_short,
            self.made_up("64K only short", 64 * K, 0, 107),
            self.made_up("128K only short", 128 * K, 0, 107),
        ]

    def random_cases(self, count: int, seed: int) -> list[Case]:
        """Micro-batches of 32K to 128K tokens, a quarter each under every cap of ``CAPS``."""
        cases: list[Case] = []
        for number in range(count):
            own = f"{seed}/choice/{number}"
            context = random.Random(own).randrange(32 * K, 128 * K + 1)
            cap = CAPS[number % len(CAPS)]
            lengths = self.draw(self.size(context), own, None if cap is None else self.size(cap))
            kind = "long" if max(lengths) >= self.size(LONG) else "short"
            capped = "" if cap is None else f", up to {cap // K}K"
            cases.append(Case(f"random {number}{capped}", context, kind, tuple(lengths), own))
        return cases

    def check_lengths(self) -> list[int]:
        """A micro-batch of about 4K tokens with awkward lengths, for comparing with a reference."""
        lengths = [self.size(n) for n in (1, 7, 137, 2041)]
        return [*lengths, self.size(4096) - sum(lengths)]


def placed_label(threshold: int) -> str:
    """What tables call placed sharding with a fixed threshold."""
    return f"placed {threshold // K}K"


def configs(cp_size: int, shrink: int) -> dict[str, ShardingConfig]:
    """Every strategy by its label, adaptive last."""

    def config(strategy: str, threshold: int | None = None) -> ShardingConfig:
        return ShardingConfig(cp_size, strategy, threshold, max_token_skew=MAX_TOKEN_SKEW)  # type: ignore[arg-type]

    fixed = {placed_label(n): config("placed", max(n // shrink, 1)) for n in THRESHOLDS}
    plain = {strategy: config(strategy) for strategy in (PER_SEQUENCE, PER_DOCUMENT)}
    return {**plain, **fixed, PLACED: config("placed"), ADAPTIVE: config("adaptive")}


def plans(
    lengths: Sequence[int], workload: WorkloadModel, strategies: dict[str, ShardingConfig]
) -> dict[str, ShardPlan]:
    """Every strategy's plan of a micro-batch."""
    return {label: Sharder(config, workload).plan(lengths) for label, config in strategies.items()}


def distinct(found: dict[str, ShardPlan]) -> dict[str, str]:
    """Label -> the first label whose plan holds the same, so that equal plans are measured once."""
    first: dict[int, str] = {}
    return {label: first.setdefault(plan.digest(), label) for label, plan in found.items()}
