"""The outliers that ``steady`` holds back, and which of them may leave in a step.

The paper keeps one first-in-first-out queue per range of lengths and lets N leave when N wait. Here all outliers lie
in one pool sorted by workload, and a window of neighbours (so: of similar workload) leaves as soon as the step that
takes it is predicted to stay balanced: often that takes fewer than N of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hf_wlb.packing.fluid import FluidStep
from hf_wlb.packing.types import Document

#: A window may exceed the tokens left in its step by this share of the step, made up for in the next one: N documents
#: of exactly the context length (pieces of longer ones) fill a step to the last token, which is never left quite empty.
OVERSHOOT = 0.02

#: With replicas to deal to, so many micro-batches of windows are tried for the cheapest; beyond, every n-th window.
WINDOW_WORK = 1 << 13


def heaviest_first(document: Document) -> tuple[float, int, int]:
    """Sort key: workload descending, ties in data set order."""
    return (-document.workload, document.index, document.start)


def oldest_first(document: Document) -> tuple[int, int, int, int]:
    """Sort key: arrival, then length descending, ties in data set order."""
    return (document.arrived, -document.length, document.index, document.start)


@dataclass
class Draft:
    """A step in the making.

    Attributes:
        budget: Tokens that the step should have.
        regular: Documents that need not wait.
        outliers: Those that were let go in this step, heaviest first.
        tokens: Of both.
        work: Workload of both.
    """

    budget: int
    regular: list[Document] = field(default_factory=list)
    outliers: list[Document] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0

    @property
    def room(self) -> int:
        """Tokens still to come."""
        return self.budget - self.tokens

    @property
    def window_room(self) -> float:
        """Tokens that a window of outliers may bring."""
        return self.room + OVERSHOOT * self.budget

    @property
    def documents(self) -> list[Document]:
        """All of them."""
        return [*self.outliers, *self.regular]

    def add(self, document: Document) -> None:
        """Adds a document that need not wait."""
        self.regular.append(document)
        self._count(document)

    def let_go(self, documents: Sequence[Document]) -> None:
        """Adds outliers."""
        for document in documents:
            insort(self.outliers, document, key=heaviest_first)
            self._count(document)

    def _count(self, document: Document) -> None:
        self.tokens += document.length
        self.work += document.workload


class OutlierPool:
    """Outliers sorted by workload.

    Args:
        fluid: Predicts a step's time.
        micro_batches: Per step.
    """

    def __init__(self, fluid: FluidStep, micro_batches: int) -> None:
        self._fluid = fluid
        self._micro_batches = micro_batches
        self._documents: list[Document] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self._documents)

    def add(self, document: Document) -> None:
        """Takes an outlier in."""
        insort(self._documents, document, key=heaviest_first)
        self.tokens += document.length

    def restore(self, documents: list[Document]) -> None:
        """Replaces the content."""
        self._documents = sorted(documents, key=heaviest_first)
        self.tokens = sum(document.length for document in documents)

    def overdue(self, step: int, max_wait_steps: int) -> bool:
        """Whether some document has waited for as long as it may."""
        return any(step - document.arrived >= max_wait_steps for document in self._documents)

    def take_balanced(self, draft: Draft, density: float, max_gap: float) -> list[Document]:
        """Removes what may leave without making the step more than ``max_gap`` longer than perfect balance.

        The heaviest document that can leave at all goes, with as many of its lighter neighbours as balance needs;
        then every other that fits in. Empty if there is none.
        """
        window = self._first_balanced(draft, density, max_gap)
        if window is None:
            return []
        first, last = window
        last = self._fewest(draft, first, last, density, max_gap)
        taken = self._remove(first, last)
        draft.let_go(taken)
        return taken + self._take_fitting(draft, first, density, max_gap)

    def _first_balanced(self, draft: Draft, density: float, max_gap: float) -> tuple[int, int] | None:
        """The full window that starts with the heaviest document that can leave."""
        sums = [0, *accumulate(document.length for document in self._documents)]
        excess = [0.0, *accumulate(d.workload - density * d.length for d in self._documents)]

        def last_of(first: int) -> int:
            return min(bisect_right(sums, sums[first] + draft.window_room, first) - 1, first + self._micro_batches)

        def balanced(first: int) -> bool:
            last = last_of(first)
            if last <= first:
                return False
            mean = (draft.work + density * draft.room + excess[last] - excess[first]) / self._micro_batches
            if self._fluid.least_gap(self._documents[first].workload, mean) > max_gap:
                return False
            return self._gap(draft, self._documents[first:last], density) <= max_gap

        if self._fluid.quick:
            found = next((first for first in range(len(self._documents)) if balanced(first)), None)
        else:
            # Lighter windows are easier to balance, nearly always: bisect for the heaviest that is.
            found = bisect_left(range(len(self._documents)), True, key=balanced)
            found = found if found < len(self._documents) else None
        return None if found is None else (found, last_of(found))

    def take_cheapest(self, draft: Draft, density: float, oldest: bool) -> list[Document]:
        """Removes the full window of neighbours whose release costs least time per token.

        Args:
            draft: The step.
            density: Workload per token of documents that need not wait.
            oldest: Only windows that hold the document that has waited longest.
        """
        documents = self._documents
        sums = [0, *accumulate(document.length for document in documents)]
        must = min(range(len(documents)), key=lambda i: (documents[i].arrived, documents[i].index), default=0)
        best: tuple[float, int, int] | None = None
        count = must + 1 if oldest else len(documents)
        every = 1 if self._fluid.quick else 1 + count * self._micro_batches // WINDOW_WORK
        for first in range(count - 1, -1, -every)[::-1]:  # the last one always
            last = min(bisect_right(sums, sums[first] + draft.window_room, first) - 1, first + self._micro_batches)
            if last <= first or (oldest and last <= must):  # last < first: no room at all
                continue
            cost = self._gap(draft, documents[first:last], density) / (sums[last] - sums[first])
            if best is None or cost < best[0]:
                best = (cost, first, last)
        if best is None:
            return []
        taken = self._remove(*best[1:])
        draft.let_go(taken)
        return taken

    @property
    def lightest(self) -> Document | None:
        """The document of least workload."""
        return self._documents[-1] if self._documents else None

    def take_oldest(self, draft: Draft, arrived: int, tokens: int) -> None:
        """Removes what arrived in step ``arrived`` or before, oldest first, up to ``tokens``, room or not."""
        ages = sorted((d for d in self._documents if d.arrived <= arrived), key=oldest_first)
        taken = []
        for document in ages:
            tokens -= document.length
            if tokens < 0:
                break
            taken.append(document)
        for document in taken:
            place = bisect_left(self._documents, heaviest_first(document), key=heaviest_first)
            self._remove(place, place + 1)
        draft.let_go(taken)

    def take_one(self, draft: Draft) -> None:
        """Removes the document that has waited longest, room or not."""
        oldest = min(self._documents, key=oldest_first)
        self.take_oldest(draft, oldest.arrived, oldest.length)

    def take_all(self, draft: Draft) -> list[Document]:
        """Removes as many as the budget holds, heaviest first, at least one if the step is empty."""
        taken = []
        while self._documents and (self._documents[0].length <= draft.room or not draft.tokens):
            taken += self._remove(0, 1)
            draft.let_go(taken[-1:])
        return taken

    def _fewest(self, draft: Draft, first: int, last: int, density: float, max_gap: float) -> int:
        low, high = first + 1, last
        while low < high:
            middle = (low + high) // 2
            if self._gap(draft, self._documents[first:middle], density) <= max_gap:
                high = middle
            else:
                low = middle + 1
        return high

    def _take_fitting(self, draft: Draft, first: int, density: float, max_gap: float) -> list[Document]:
        taken: list[Document] = []
        place, refused = first, 0
        while place < len(self._documents) and (self._fluid.quick or refused < 2):
            document = self._documents[place]
            if document.length <= draft.room and self._gap(draft, [document], density) <= max_gap:
                taken += self._remove(place, place + 1)
                draft.let_go(taken[-1:])
            else:
                place += 1
                refused += 1
        return taken

    def _gap(self, draft: Draft, further: Sequence[Document], density: float) -> float:
        outliers = sorted([*draft.outliers, *further], key=heaviest_first) if draft.outliers else further
        room = draft.room - sum(document.length for document in further)
        total = draft.work + sum(document.workload for document in further) + density * room
        solid = self._fluid.solidify(outliers)
        if sum(map(len, solid.members)) < len(outliers):
            return float("inf")  # one of them fits in no micro-batch beside the others
        return self._fluid.gap(solid, total, density)

    def _remove(self, first: int, last: int) -> list[Document]:
        taken = self._documents[first:last]
        del self._documents[first:last]
        self.tokens -= sum(document.length for document in taken)
        return taken
