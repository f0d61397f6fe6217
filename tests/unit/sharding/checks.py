"""What any plan must keep, checked token by token, and slow second computations of what the package computes fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from hf_wlb.sharding import SHARDED, Rows, Sharder, ShardingConfig, ShardLayout, ShardPlan, shard_layout
from hf_wlb.sharding.cost import HIDDEN, WAITING
from hf_wlb.workload import AnalyticWorkload, WorkloadModel

WORKLOAD = AnalyticWorkload.from_crossover(1000)
CP_SIZES = (1, 2, 3, 4, 8)
STRATEGIES = ("per_sequence", "per_document", "placed", "adaptive")


def odd_lengths(cp_size: int) -> list[int]:
    """Lengths at which cutting goes wrong if it goes wrong."""
    return [1, 2 * cp_size - 1, 2 * cp_size, 2 * cp_size + 1, 7, 137, 2041]


def make_plan(lengths: Sequence[int], cp_size: int, strategy: str, workload=WORKLOAD, **options) -> ShardPlan:
    return Sharder(ShardingConfig(cp_size, strategy, **options), workload).plan(lengths)


def bounds_of(lengths: Sequence[int], cp_size: int, max_token_skew: float, max_tokens: int | None) -> tuple:
    """Fewest and most tokens of a rank: an even share and the skew, or a token, within the memory."""
    even = sum(lengths) / cp_size
    slack = max(max_token_skew * even, 1.0)
    return max(1.0, even - slack), min(even + slack, max_tokens or np.inf)


@st.composite
def micro_batches(draw, most: int = 300, documents: int = 12) -> tuple[list[int], int]:
    """Lengths and a cp_size that they suffice for."""
    cp_size = draw(st.sampled_from(CP_SIZES))
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=documents))
    lengths[0] += max(0, cp_size - sum(lengths))
    return lengths, cp_size


@st.composite
def any_plans(draw) -> ShardPlan:
    """Plans that no strategy would make: any owners, any cuts, ranks without tokens."""
    lengths, cp_size = draw(micro_batches(most=40, documents=6))
    owner = np.array([draw(st.integers(SHARDED, cp_size - 1)) for _ in lengths], dtype=np.int64)
    edges = [
        [0, *sorted(draw(st.lists(st.integers(0, n), min_size=2 * cp_size - 1, max_size=2 * cp_size - 1))), n]
        for n, rank in zip(lengths, owner, strict=True)
        if rank == SHARDED
    ]
    cuts = np.array(edges, dtype=np.int64).reshape(len(edges), 2 * cp_size + 1)
    return ShardPlan(np.array(lengths, dtype=np.int64), cp_size, owner, cuts, "any")


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    """Places in the micro-batch of every document's tokens."""
    places, start = [], 0
    for length in lengths:
        places.append(list(range(start, start + int(length))))
        start += int(length)
    return places


def check_plan(plan: ShardPlan) -> None:
    """Every token lies on exactly one rank, and every layout is as ``check_layout`` wants it."""
    layouts = [shard_layout(plan, rank) for rank in range(plan.cp_size)]
    held = sorted(token for layout in layouts for token in layout.tokens.tolist())
    assert held == list(range(int(plan.lengths.sum())))
    assert [len(layout.tokens) for layout in layouts] == plan.tokens.tolist()
    assert [layout.rank for layout in layouts] == list(range(plan.cp_size))
    for layout in layouts:
        check_layout(plan, layout)


def chunks_of(plan: ShardPlan, rank: int) -> tuple[list[tuple], list[tuple]]:
    """Head and tail chunks of a rank that hold tokens: the document's tokens, the chunk's first, and its end."""
    documents = documents_of(plan.lengths)
    parts = []
    for chunk in (rank, 2 * plan.cp_size - 1 - rank):
        cuts = [(documents[i], row[chunk], row[chunk + 1]) for i, row in zip(plan.sharded, plan.edges, strict=True)]
        parts.append([(document, int(first), int(stop)) for document, first, stop in cuts if first < stop])
    return parts[0], parts[1]


def sent_by(plan: ShardPlan, rank: int) -> list[int]:
    """Places in the micro-batch of the tokens whose keys and values a rank sends: heads, then tails."""
    return [token for part in chunks_of(plan, rank) for document, first, stop in part for token in document[first:stop]]


def gathered_by_hand(plan: ShardPlan) -> list[int]:
    """Places in the micro-batch of what every rank gathers; -1, which is no token, where a rank sends padding."""
    sent = [sent_by(plan, rank) for rank in range(plan.cp_size)]
    padded = max(map(len, sent))
    return [token for tokens in sent for token in tokens + [-1] * (padded - len(tokens))]


def check_layout(plan: ShardPlan, layout: ShardLayout) -> None:
    """Order, positions, and that every query reads its own document's keys up to itself, and no others."""
    documents = documents_of(plan.lengths)
    position = {token: place for document in documents for place, token in enumerate(document)}
    tokens = layout.tokens.tolist()
    assert layout.position_ids.tolist() == [position[token] for token in tokens]
    local = [token for i in np.flatnonzero(plan.owner == layout.rank) for token in documents[i]]
    assert tokens == local + sent_by(plan, layout.rank)
    assert (layout.local_tokens, layout.exchanged_tokens) == (len(local), len(tokens) - len(local))
    check_rows(layout.local, local, local, documents)
    gathered = gathered_by_hand(plan)
    assert layout.padded * layout.cp_size == len(gathered) and layout.cp_size == plan.cp_size
    assert layout.gathered == sum(len(documents[i]) for i in plan.sharded)
    heads, tails = (
        [token for document, _, stop in part for token in document[:stop]] for part in chunks_of(plan, layout.rank)
    )
    assert layout.order.dtype == layout.inverse.dtype == np.int64
    picked = [gathered[place] for place in layout.order.tolist()]
    assert picked == heads + tails
    check_rows(layout.chunks, tokens[len(local) :], picked, documents)
    check_gradients(layout, heads, tails)


def check_gradients(layout: ShardLayout, heads: list[int], tails: list[int]) -> None:
    """Adding up what overlaps and looking places up by ``inverse`` gives every key the gradients of all its readers."""
    assert len(set(heads)) == len(heads) and len(set(tails)) == len(tails), "one head and one tail chunk at most"
    read = [*heads, *tails]
    gradient = np.array([*(2.0**-place for place in range(len(read))), 0.0]) if len(read) < 50 else None
    if gradient is None:
        gradient = np.array([*np.random.default_rng(0).integers(1, 2**40, len(read)), 0.0])
    expected = np.zeros(len(layout.inverse))
    np.add.at(expected, layout.order, gradient[:-1])
    for head, tail, count in layout.overlaps.tolist():
        assert read[head : head + count] == read[tail : tail + count] and head + count <= len(heads) <= tail
        gradient[tail : tail + count] += gradient[head : head + count]
    assert len(layout.inverse) == layout.cp_size * layout.padded
    assert np.array_equal(gradient[layout.inverse], expected)


def check_rows(rows: Rows, queries: list[int], keys: list[int], documents: list[list[int]]) -> None:
    assert rows.queries.dtype == rows.keys.dtype == np.int32 and len(rows.queries) == len(rows.keys)
    assert rows.queries[0] == rows.keys[0] == 0
    assert rows.queries[-1] == len(queries) and rows.keys[-1] == len(keys)
    begins = {document[0]: document for document in documents}
    widest = longest = 0
    for row in range(len(rows.queries) - 1):
        q = queries[rows.queries[row] : rows.queries[row + 1]]
        k = keys[rows.keys[row] : rows.keys[row + 1]]
        assert q, "a row without queries does nothing"
        assert q == k[-len(q) :], "the queries are the last of the row's keys"
        assert k == begins[k[0]][: len(k)], "the keys are those of one document from its first on"
        widest, longest = max(widest, len(q)), max(longest, len(k))
    assert (rows.longest_query, rows.longest_keys) == (widest, longest)


def deal_by_hand(lengths: Sequence[int], cp_size: int) -> list[list[int]]:
    """Widths of the chunks by the paper's rule, one token after the other."""
    turn, widths = 0, []
    for length in lengths:
        row = [length // (2 * cp_size)] * (2 * cp_size)
        for _ in range(length % (2 * cp_size)):
            row[turn % (2 * cp_size)] += 1
            turn += 1
        widths.append(row)
    return widths


def predict_by_hand(plan: ShardPlan, workload: WorkloadModel) -> list[float]:
    """Workload of every rank from the rows of its attention calls, one row at a time."""
    layouts = [shard_layout(plan, rank) for rank in range(plan.cp_size)]
    loads, chunks = [], []
    for layout in layouts:
        priced = []
        for rows in (layout.local, layout.chunks):
            pairs = zip(np.diff(rows.queries).tolist(), np.diff(rows.keys).tolist(), strict=True)
            priced.append(sum(float(workload.segment([q], [k])[0]) for q, k in pairs))
        exchange = workload.exchange(plan.cp_size * max(other.exchanged_tokens for other in layouts), plan.cp_size)
        hidden = min(priced[0], HIDDEN * exchange)  # the gathers, while local documents are attended to
        loads.append(sum(priced) + exchange - hidden + workload.linear(len(layout.tokens)))
        chunks.append(priced[1])
    return [load + WAITING * (max(chunks) - own) for load, own in zip(loads, chunks, strict=True)]
