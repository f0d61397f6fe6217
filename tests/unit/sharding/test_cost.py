"""What plans are predicted to cost, against sums over the rows of their layouts and against numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.sharding import SHARDED, ShardCosts, ShardPlan, per_document, per_sequence
from hf_wlb.sharding.cost import HIDDEN, WAITING
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload

from .checks import WORKLOAD, any_plans, make_plan, micro_batches, predict_by_hand


def profiled() -> ProfiledWorkload:
    """Chunks that run slower than documents, a sliding layer, and collectives over 2, 3, 4 and 8 ranks."""
    timed = [(q, kv, 1e-9 * (q * kv - q * (q - 1) / 2 + 200 * kv)) for q, kv in ((8, 8), (8, 500), (400, 400))]
    return ProfiledWorkload.from_dict(
        {
            "schema": "hf_wlb.profile/1",
            "metadata": {"device": "made up", "dtype": "bfloat16", "model": {"kv_width": 16}, "versions": {}},
            "layers": [{"count": 2, "window": None}, {"count": 1, "window": 50}],
            "attention": [
                {"q_len": q, "kv_len": kv, "forward_seconds": s, "backward_seconds": 3 * s}
                for q, kv, s in sorted(timed)
            ],
            "linear": [{"tokens": 100, "forward_seconds": 1e-5, "backward_seconds": 2e-5}],
            "collectives": [
                {"operation": operation, "group_size": ranks, "bytes": 64, "seconds": 1e-6 * ranks}
                for operation in ("all_gather", "reduce_scatter")
                for ranks in (2, 3, 4, 8)
            ],
        }
    )


SLIDING = AnalyticWorkload(1.0, 50.0, ((2.0, 5),), segment_overhead_tokens=3.0, exchange_seconds_per_token=40.0)
MODELS = (WORKLOAD, SLIDING, profiled())


def test_predictions_by_hand() -> None:
    """2 a pair, 10 a token, 1 query's pairs wasted a row, 5 x (2 - 1) / 2 a token exchanged."""
    workload = AnalyticWorkload(2.0, 10.0, segment_overhead_tokens=1.0, exchange_seconds_per_token=5.0)
    # Document 0 whole on rank 0; document 1 in chunks of 1, 1, 2, 0: rank 0 has 1 token of it, rank 1 has 3.
    plan = ShardPlan(np.array([3, 4]), 2, np.array([0, SHARDED]), np.array([[0, 1, 2, 4, 4]]), "example")
    whole = 2 * (6 + 3)  # 6 pairs, 3 keys
    exchange = 2.5 * 2 * 3  # both ranks send 3 tokens, padding included: 15, of which the local document hides some
    head = 2 * (1 + 1)
    hidden = HIDDEN * exchange
    assert 0 < hidden < whole
    others = [0, 2 * (2 + 2) + 2 * (3 + 4 + 4)]  # rank 1: 1 query of 2 keys, 2 queries of 3 and 4 keys
    waiting = WAITING * (others[1] - head)  # rank 0 has less to do on chunks
    expected = [whole + exchange - hidden + head + waiting + 10 * 4, exchange + others[1] + 10 * 3]
    costs = ShardCosts.of(plan.lengths, workload, 2)
    assert costs.predict([plan]).tolist() == [expected]
    assert predict_by_hand(plan, workload) == expected


@settings(deadline=None)
@given(any_plans(), st.sampled_from(MODELS))
def test_predictions_are_sums_over_the_rows_of_the_calls(plan, workload) -> None:
    predicted = ShardCosts.of(plan.lengths, workload, plan.cp_size).predict([plan])[0]
    assert predicted == pytest.approx(predict_by_hand(plan, workload), rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(micro_batches(), st.sampled_from(["per_sequence", "per_document", "placed", "adaptive"]))
def test_a_plan_holds_the_prediction_it_was_chosen_by(given_, strategy) -> None:
    plan = make_plan(*given_, strategy)
    assert plan.predicted == pytest.approx(predict_by_hand(plan, WORKLOAD), rel=1e-9)
    assert plan.imbalance == pytest.approx(plan.predicted.max() / plan.predicted.mean())


def test_plans_are_priced_together_as_one_by_one() -> None:
    lengths = np.array([500, 20, 3, 90])
    plans = [per_sequence(lengths, 4), make_plan(lengths, 4, "placed"), per_document(lengths, 4)]
    costs = ShardCosts.of(lengths, WORKLOAD, 4)
    assert costs.predict(plans).tolist() == [costs.predict([plan])[0].tolist() for plan in plans]
    assert costs.predict([]).shape == (0, 4)


def test_control_a_chunk_without_the_keys_before_it_costs_less() -> None:
    plan = per_document([400], 2)
    costs = ShardCosts.of(plan.lengths, WORKLOAD, 2)
    widths = np.diff(plan.edges, axis=1)
    alone = WORKLOAD.segment(widths, widths).sum()
    assert costs.chunks(plan.edges).sum() > 2 * alone


def test_one_rank_costs_what_the_micro_batch_costs() -> None:
    workload = AnalyticWorkload(2.0, 10.0, exchange_seconds_per_token=5.0)
    plan = per_document([30, 7], 1)
    assert ShardCosts.of(plan.lengths, workload, 1).predict([plan])[0, 0] == workload.micro_batch([30, 7])


def test_ideal_by_hand() -> None:
    workload = AnalyticWorkload(2.0, 10.0, segment_overhead_tokens=1.0)
    assert ShardCosts.of(np.array([3, 1]), workload, 2).ideal == (2 * (6 + 3) + 2 * (1 + 1) + 40) / 2


@settings(deadline=None, max_examples=40)
@given(micro_batches(), st.sampled_from(["per_sequence", "per_document", "placed"]))
def test_no_plan_is_better_than_ideal(given_, strategy) -> None:
    lengths, cp_size = given_
    ideal = ShardCosts.of(np.array(lengths), WORKLOAD, cp_size).ideal
    assert make_plan(lengths, cp_size, strategy).slowest >= ideal * (1 - 1e-12)


def test_a_plan_without_a_prediction_says_so() -> None:
    for figure in ("imbalance", "slowest"):
        with pytest.raises(ValueError, match="made without a workload model"):
            getattr(per_document([30, 7], 2), figure)
