"""Checking that all ranks mean the same, before they act on it.

Planning is replicated, not communicated: every rank computes the same plan for itself. One integer per step is
compared, so that ranks whose data, settings or library versions differ stop at once with an error on all of
them, instead of training different documents or hanging in a collective later. For the same reason a rank that fails
while it sets up tells the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from hf_wlb.parallel.collectives import gather_objects, group_device, process_count

MOST_NAMED = 6
"""Settings that an error names."""


def verify_agreement(value: int, what: str, group: dist.ProcessGroup | None = None, place: str = "") -> None:
    """Compare ``value`` over all ranks; every rank of the group must call this the same number of times.

    Does nothing in a single process. Costs one all-gather of 8 bytes a rank.

    Args:
        value: Any integer that fits 64 bits, signed; ``StepPlan.digest()`` for plans.
        what: What is compared, as a noun phrase for the error, such as ``"the plan of step 3"``. Ranks that are about
            to do different things may meet here with different phrases, and different values; the error has these.
        group: The ranks to compare; all of them by default.
        place: This rank's, for the error: ``ParallelMesh.place``.

    Raises:
        RuntimeError: On every rank alike, if the values differ; it names each value and the ranks that hold it.
        ValueError: If ``value`` does not fit 64 bits.

    >>> verify_agreement(7, "a number")  # one process always agrees with itself
    """
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"verify_agreement compares integers of 64 bits; {value} for {what} does not fit.")
    if process_count() == 1:
        return
    own = torch.tensor([value], dtype=torch.int64, device=group_device(group))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    values: list[Hashable] = [int(tensor.item()) for tensor in gathered]
    if len(set(values)) > 1:
        told: list[tuple[str, str]] = gather_objects((place, what), group)
        places, compared = [found for found, _ in told], [found for _, found in told]
        if len(set(compared)) > 1:  # ranks that are about to do different things
            what, values = "what comes next", list(compared)
        raise RuntimeError(
            f"The ranks do not agree on {what}: {by_rank(values, places)}. Every rank plans for itself and must "
            "be given the same documents in the same order, the same settings, seed, epoch and resume state, and the "
            "same version of hf_wlb. A callback that stops, saves or evaluates must do so on every rank."
        )


def verify_settings(
    settings: Mapping[str, object],
    group: dist.ProcessGroup | None = None,
    place: str = "",
    of_place: Mapping[str, object] | None = None,
) -> None:
    """Compare settings over all ranks, each by its text; every rank of the group must call this together.

    Meant for the beginning: costs more than ``verify_agreement``.

    Args:
        settings: The same names on every rank, as the user knows them.
        group: The ranks to compare; all of them by default.
        place: This rank's, for the error: ``ParallelMesh.place``.
        of_place: Further ones, that only ranks with the same ``place`` must share: stages have layers of their own.

    Raises:
        RuntimeError: On every rank alike, if some differ; it names the first of these, their values and the ranks that
            hold them.

    >>> verify_settings({"full_determinism": True})
    """
    own, apart = dict(settings), of_place or {}
    told = gather_objects((place, {name: str(value) for name, value in {**own, **apart}.items()}), group)
    places, given = [found for found, _ in told], [found for _, found in told]
    differing = [
        f"{name} ({by_rank({rank: given[rank].get(name) for rank in ranks}, places)})"
        for name, together in [*((name, False) for name in own), *((name, True) for name in apart)]
        for ranks in _together(places if together else [""] * len(places))
        if len({given[rank].get(name) for rank in ranks}) > 1
    ]
    if differing:
        more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
        raise RuntimeError(
            f"The ranks do not agree on {', '.join(differing[:MOST_NAMED])}{more}. They train one model together: give "
            "all of them the same arguments and the same model."
        )


def _together(places: Sequence[str]) -> list[list[int]]:
    """The ranks of every place."""
    return [[rank for rank, found in enumerate(places) if found == place] for place in dict.fromkeys(places)]


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None, place: str = "") -> Iterator[None]:
    """Ends on all ranks alike: where one rank's block raises, the others do so too instead of waiting for it.

    All ranks of the group must come here together, and the block must not talk to other ranks.

    Args:
        group: The ranks that go on together; all of them by default.
        place: This rank's, for the error: ``ParallelMesh.place``.

    Raises:
        Exception: On a rank whose block raised, that.
        RuntimeError: On the others, naming the ranks that failed and what they said.

    >>> with failing_together():  # one process fails by itself
    ...     int("x")
    Traceback (most recent call last):
    ValueError: invalid literal for int() with base 10: 'x'
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    told = gather_objects((place, None if problem is None else f"{type(problem).__name__}: {problem}"), group)
    if problem is not None:
        raise problem
    places = [found for found, _ in told]
    failed = [f"{name_ranks([rank], places)} with {text}" for rank, (_, text) in enumerate(told) if text is not None]
    if failed:
        raise RuntimeError(f"This rank stops because others failed: {'; '.join(failed)}")


def by_rank(values: Sequence[Hashable] | Mapping[int, Hashable], places: Sequence[str] = ()) -> str:
    """Who has what, in words.

    Args:
        values: Every rank's, or by rank those of some.
        places: Every rank's, see ``name_ranks``.

    >>> by_rank([1, 2, 1])
    'ranks 0, 2 have 1; rank 1 has 2'
    >>> by_rank({2: "a", 3: "b"}, ["stage 0", "stage 1", "stage 0", "stage 1"])
    'rank 2 (stage 0) has a; rank 3 (stage 1) has b'
    """
    holders: dict[Hashable, list[int]] = {}
    for rank, given in values.items() if isinstance(values, Mapping) else enumerate(values):
        holders.setdefault(given, []).append(rank)
    return "; ".join(
        f"{name_ranks(ranks, places)} {'has' if len(ranks) == 1 else 'have'} {given}"
        for given, ranks in holders.items()
    )


def name_ranks(ranks: Sequence[int], places: Sequence[str] = ()) -> str:
    """Ranks in words.

    Args:
        ranks: At least one.
        places: Of all ranks, what each is besides its number; empty where it is nothing else.

    >>> name_ranks([1]), name_ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    >>> name_ranks([0, 1, 2], ["stage 0", "stage 1", "stage 0", "stage 1"])
    'ranks 0, 2 (stage 0) and 1 (stage 1)'
    """
    together: dict[str, list[str]] = {}
    for rank in ranks:
        together.setdefault(places[rank] if places else "", []).append(str(rank))
    named = (", ".join(numbers) + (f" ({place})" if place else "") for place, numbers in together.items())
    return f"rank{'' if len(ranks) == 1 else 's'} {' and '.join(named)}"
