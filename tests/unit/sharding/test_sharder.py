"""The choice among strategies, and that it is the same everywhere."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.sharding import SHARDED, ShardCosts, Sharder, ShardingConfig, per_document
from hf_wlb.sharding.placed import Placement, TokenBounds
from hf_wlb.sharding.sharder import placements
from hf_wlb.workload import AnalyticWorkload
from tests.support.source_tree import REPOSITORY

from .checks import WORKLOAD, make_plan, micro_batches

# Llama-2-7B with flash-attn 4, as hf-wlb shard prices it.
FULL_SIZE = AnalyticWorkload(
    3.0e-9, 5.34e-5, unit="seconds", segment_overhead_tokens=150.0, exchange_seconds_per_token=3.5e-6
)
MIX = [3120, 905, 17_400, 512, 2048, 260, 7300, 1100, 90, 4400, 3100, 725]


@settings(deadline=None, max_examples=60)
@given(micro_batches(most=3000, documents=20), st.sampled_from([0.0, 0.05, 0.5]))
def test_adaptive_is_predicted_to_be_the_fastest_of_all(given_, skew) -> None:
    lengths, cp_size = given_
    adaptive = make_plan(lengths, cp_size, "adaptive", max_token_skew=skew).predicted.max()
    for strategy in ("per_sequence", "per_document", "placed"):
        assert adaptive <= make_plan(lengths, cp_size, strategy, max_token_skew=skew).predicted.max() * (1 + 1e-12)
    if cp_size > 1:
        costs = ShardCosts.of(np.array(lengths), WORKLOAD, cp_size)
        tried = placements(Placement(costs, TokenBounds.of(sum(lengths), cp_size, skew, None)), costs, len(lengths))
        assert adaptive <= costs.predict(tried).max(axis=1).min() * (1 + 1e-12)


def test_adaptive_cuts_one_long_document_as_per_document_does() -> None:
    plan = make_plan([131_072], 4, "adaptive", FULL_SIZE)
    assert plan.owner.tolist() == [SHARDED]
    assert plan.edges.tolist() == per_document([131_072], 4).edges.tolist()


def test_adaptive_leaves_many_short_documents_whole() -> None:
    lengths = np.random.default_rng(0).integers(100, 1200, 200)
    plan = make_plan(lengths, 4, "adaptive", FULL_SIZE)
    # Cutting the longest would bring less than a thousandth, which is not worth an exchange.
    assert (plan.owner != SHARDED).all() and plan.strategy == "placed"
    assert plan.imbalance < 1.01 and plan.token_skew < 0.05


def test_adaptive_shards_the_long_one_of_a_mix() -> None:
    plan = make_plan([90_000, *MIX], 4, "adaptive", FULL_SIZE)
    assert plan.owner[0] == SHARDED and (plan.owner[1:] != SHARDED).sum() >= len(MIX) - 1
    assert plan.predicted.max() < make_plan([90_000, *MIX], 4, "per_sequence", FULL_SIZE).predicted.max() / 1.3


def test_adaptive_may_choose_per_sequence() -> None:
    """Every two documents fill one of 8 chunks here: an even share that placing 16 documents does not find."""
    lengths = [30, 70, 62, 38, 94, 6, 94, 6, 68, 32, 13, 87, 62, 38, 50, 50]
    workload = AnalyticWorkload(0.0, 1.0, exchange_seconds_per_token=10.0)
    plan = make_plan(lengths, 4, "adaptive", workload, max_token_skew=0.5)
    assert plan.strategy == "per_sequence" and plan.owner.tolist() == np.repeat([0, 1, 2, 3, 3, 2, 1, 0], 2).tolist()
    assert plan.predicted.tolist() == [200.0] * 4
    assert make_plan(lengths, 4, "placed", workload, max_token_skew=0.5).slowest > 200.0


def lognormal(seed: int, documents: int = 200) -> list[int]:
    """Lengths whose tail is as long as that of real documents."""
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.7, documents)
    return np.clip(drawn, 1, 131_072).astype(int).tolist()


KINDS = {
    "short": np.random.default_rng(0).integers(100, 1200, 200).tolist(),
    "one long": [90_000] + [200] * 199,
    "long tail": lognormal(1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_planning_two_hundred_documents(cp_size, kind, capsys) -> None:
    sharder = Sharder(ShardingConfig(cp_size), FULL_SIZE)
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        plan = sharder.plan(KINDS[kind])
        seconds.append(time.perf_counter() - begin)
    with capsys.disabled():
        print(f"\nplanning 200 documents, {kind}, at cp {cp_size}: {sorted(seconds)[4] * 1e3:.2f} ms", end=" ")
    assert plan.token_skew <= 0.05


def placement_of(lengths: list[int], cp_size: int, workload: AnalyticWorkload) -> tuple[Placement, ShardCosts]:
    costs = ShardCosts.of(np.array(lengths), workload, cp_size)
    return Placement(costs, TokenBounds.of(sum(lengths), cp_size, 0.05, None)), costs


@settings(deadline=None, max_examples=60)
@given(micro_batches(most=3000, documents=20))
def test_no_plan_is_faster_than_its_bound(given_) -> None:
    """Of any number of sharded documents; else the best plan could be left out of the search."""
    lengths, cp_size = given_
    placement, costs = placement_of(lengths, cp_size, WORKLOAD)
    seen: list[float] = []
    for count, least in enumerate(placement.at_least(range(len(lengths) + 1))):
        plan = placement.place(count)
        if plan is None or len(plan.edges) < count or not np.diff(plan.edges, axis=1).all():
            continue  # a document that some rank has nothing of is priced with fewer chunks than in the bound
        assert costs.price([plan])[0].slowest >= least * (1 - 1e-9) - costs.linear * cp_size  # rounding
        seen.append(least / costs.price([plan])[0].slowest)
    if len(lengths) == 1 and cp_size > 1 and seen:
        assert seen[-1] > 0.9  # and a bound it is, not just any small number


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_few_placements_are_tried_and_none_that_is_left_out_is_better(cp_size, monkeypatch) -> None:
    tried: list[int] = []
    place = Placement.place
    monkeypatch.setattr(Placement, "place", lambda self, *given: tried.append(given[0]) or place(self, *given))
    for lengths in (*KINDS.values(), [90_000, *MIX], *(lognormal(seed) for seed in range(2, 6))):
        placement, costs = placement_of(lengths, cp_size, FULL_SIZE)
        found = min(plan.slowest for plan in placements(placement, costs, len(lengths)))
        assert len(tried) <= 6
        tried.clear()
        every = [
            plan for count in range(0, len(lengths) + 1, 1 + len(lengths) // 40) if (plan := place(placement, count))
        ]
        best = min(plan.slowest for plan in costs.price(every))
        assert found <= best * 1.005


@settings(deadline=None, max_examples=30)
@given(micro_batches(), st.sampled_from(["per_sequence", "per_document", "placed", "adaptive"]))
def test_the_same_lengths_get_the_same_plan(given_, strategy) -> None:
    lengths, cp_size = given_
    plan = make_plan(lengths, cp_size, strategy)
    for again in (make_plan(lengths, cp_size, strategy), make_plan(np.array(lengths, np.int32), cp_size, strategy)):
        assert again.digest() == plan.digest() and again.predicted.tolist() == plan.predicted.tolist()
        assert again.owner.tolist() == plan.owner.tolist() and again.edges.tolist() == plan.edges.tolist()


def test_another_process_makes_the_same_plan() -> None:
    script = (
        "from hf_wlb.sharding import Sharder, ShardingConfig\n"
        "from hf_wlb.workload import AnalyticWorkload\n"
        f"workload = AnalyticWorkload.from_dict({FULL_SIZE.to_dict()!r})\n"
        f"print(Sharder(ShardingConfig(4), workload).plan({[90_000, *MIX]}).digest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY
    )
    assert int(done.stdout) == make_plan([90_000, *MIX], 4, "adaptive", FULL_SIZE).digest()


def test_planning_leaves_the_lengths_as_they_are() -> None:
    lengths = np.array(MIX)
    lengths.setflags(write=False)
    assert make_plan(lengths, 4, "adaptive").lengths.tolist() == MIX


def test_the_digest_changes_with_anything_that_ranks_must_agree_on() -> None:
    plan = make_plan([90, 40, 30, 20], 2, "per_document")
    edges, owner = plan.edges.copy(), plan.owner.copy()
    edges[0, 1] += 1
    local = make_plan([90, 40, 30, 20], 2, "placed", threshold=90, max_token_skew=0.9)
    owner = local.owner.copy()
    owner[3] = 1 - owner[3]
    others = [
        replace(plan, edges=edges),
        replace(plan, lengths=np.array([90, 40, 20, 30])),
        make_plan([90, 40, 30, 20], 2, "per_sequence"),
        make_plan([90, 40, 30, 20], 4, "per_document"),
        local,
        replace(local, owner=owner),
        replace(local, cp_size=4, edges=np.zeros((0, 9), dtype=np.int64)),
    ]
    digests = [plan.digest(), *(other.digest() for other in others)]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**63 for digest in digests)
    # What is only told about a plan does not count.
    assert replace(plan, strategy="placed", threshold=3, predicted=None).digest() == plan.digest()


def test_the_fingerprint_tells_apart_what_would_plan_otherwise() -> None:
    sharders = [
        Sharder(ShardingConfig(2), WORKLOAD),
        Sharder(ShardingConfig(4), WORKLOAD),
        Sharder(ShardingConfig(2, "placed"), WORKLOAD),
        Sharder(ShardingConfig(2, "placed", threshold=5), WORKLOAD),
        Sharder(ShardingConfig(2, max_token_skew=0.1), WORKLOAD),
        Sharder(ShardingConfig(2, max_tokens_per_shard=10), WORKLOAD),
        Sharder(ShardingConfig(2), AnalyticWorkload.from_crossover(1001)),
    ]
    prints = [sharder.fingerprint for sharder in sharders]
    assert len(set(prints)) == len(prints) and all(0 <= value < 2**63 for value in prints)
    assert Sharder(ShardingConfig(2), AnalyticWorkload.from_crossover(1000)).fingerprint == prints[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_size": 0}, "cp_size must be a whole number of at least 1, got 0"),
        ({"cp_size": 2.0}, "cp_size must be a whole number of at least 1, got 2.0"),
        ({"cp_size": None}, "cp_size must be a whole number of at least 1, got None"),
        ({"cp_size": True}, "cp_size must be a whole number of at least 1, got True"),
        ({"cp_size": 2, "strategy": "ring"}, "strategy must be one of per_sequence, per_document, placed, adaptive, g"),
        ({"cp_size": 2, "threshold": 100}, "threshold is for strategy='placed', but the strategy is 'adaptive'"),
        (
            {"cp_size": 2, "strategy": "placed", "threshold": -1},
            "threshold must be a whole number of at least 0, got -",
        ),
        (
            {"cp_size": 2, "strategy": "placed", "threshold": 1.5},
            "threshold must be a whole number of at least 0, got 1",
        ),
        ({"cp_size": 2, "max_tokens_per_shard": 0}, "max_tokens_per_shard must be a whole number of at least 1, got 0"),
        ({"cp_size": 2, "max_token_skew": 1.0}, "max_token_skew must be at least 0 and below 1, got 1.0"),
        ({"cp_size": 2, "max_token_skew": -0.1}, "max_token_skew must be at least 0 and below 1, got -0.1"),
        ({"cp_size": 2, "max_token_skew": float("nan")}, "max_token_skew must be at least 0 and below 1, got nan"),
    ],
)
def test_bad_settings_get_a_sentence(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        ShardingConfig(**arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2, 1], "A micro-batch of 3 tokens cannot be shared by 4 context-parallel ranks"),
        ([], "A micro-batch of 0 tokens cannot be shared by 4"),
        ([5, 0], "every document of a micro-batch has at least 1 token, but one of 0 came"),
        ([5.5], "lengths must be a flat list of whole numbers"),
    ],
)
@pytest.mark.parametrize("strategy", ["per_sequence", "per_document", "placed", "adaptive"])
def test_bad_lengths_get_a_sentence(strategy, lengths, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(lengths, 4, strategy)
