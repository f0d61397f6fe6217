from dataclasses import replace

import numpy as np
import pytest

from hf_wlb.lengths import sample_lengths
from hf_wlb.packing import PackingConfig, length_stream, tune
from hf_wlb.packing.tuning import MEMORY_FACTORS, TIME_GAPS, threshold_candidates
from hf_wlb.packing.tuning_result import TIME_FOR_MEMORY, Limits, TuningPoint, choose, pareto_front
from hf_wlb.workload import AnalyticWorkload

CONTEXT = 8192
WORKLOAD = AnalyticWorkload.from_crossover(1536)
CONFIG = PackingConfig(CONTEXT, micro_batches_per_replica=4, pp_size=4)


def long_tailed(documents: int = 4000) -> np.ndarray:
    """The reference mix at a sixteenth of its length."""
    return np.maximum(sample_lengths(documents) // 16, 1)


def point(time_gap: float, delay: float, s_max: float = 1.25, variation: float = 0.0) -> TuningPoint:
    config = replace(CONFIG, max_tokens_per_micro_batch=int(s_max * CONTEXT))
    return TuningPoint(config, time_gap, delay, 1, variation, 0.0, 0.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def result():
    return tune(long_tailed(), WORKLOAD, CONFIG, steps=20)


def test_the_recommendation_keeps_the_delay_and_is_nearly_the_fastest(result) -> None:
    allowed = [p for p in result.points if p.delay <= 1.0]
    fastest = min(p.time_gap for p in allowed)
    assert result.recommended in allowed
    assert result.recommended.time_gap <= fastest * (1 + TIME_FOR_MEMORY) + 1e-4
    assert result.recommended.time_gap < 1.05
    near = [
        p.config.s_max for p in allowed if p.time_gap <= fastest * (1 + TIME_FOR_MEMORY) and not result.default.beats(p)
    ]
    assert result.recommended.config.s_max == min(near)


def test_the_default_settings_are_among_them(result) -> None:
    assert result.default in result.points
    config = result.default.config
    assert (config.packer, config.s_max, config.max_time_gap) == ("steady", int(1.25 * CONTEXT), 0.03)
    assert config.waiting_limit == CONFIG.waiting_limit


def test_nothing_that_the_default_beats_is_recommended() -> None:
    """On flat data a smaller S_max was, with 0.39 instead of 0.02 steps of delay and no less time."""
    lengths = np.maximum(np.random.default_rng(0).integers(1000, 4000, 2000), 1)
    beaten = 0
    for layout in ({"pp_size": 1, "dp_size": 2}, {"pp_size": 4}):
        found = tune(lengths, WORKLOAD, replace(CONFIG, **layout), packers=["steady"], steps=30)
        assert found.default is not None and not found.default.beats(found.recommended)
        beaten += sum(found.default.beats(p) and p.config.s_max < found.default.config.s_max for p in found.points)
    assert beaten


def test_all_dimensions_are_tried(result) -> None:
    wlb = [p.config for p in result.points if p.config.packer == "wlb"]
    steady = [p.config for p in result.points if p.config.packer == "steady"]
    assert {len(c.thresholds) for c in wlb} == {1, 2, 3}
    assert {c.max_time_gap for c in steady} == set(TIME_GAPS)
    assert len({c.max_waiting_contexts for c in steady}) == 3
    sizes = {int(f * CONTEXT) for f in MEMORY_FACTORS}
    assert {c.s_max for c in wlb} == {c.s_max for c in steady} == sizes
    assert len({p.config for p in result.points}) == len(result.points)


def test_thresholds_come_out_between_short_and_long_documents() -> None:
    # Two kinds of documents: outliers are the long ones, and one level is enough.
    random = np.random.default_rng(0)
    lengths = np.where(random.random(6000) < 0.01, random.integers(6500, 7000, 6000), random.integers(200, 400, 6000))
    found = tune(lengths, WORKLOAD, CONFIG, packers=["wlb"], steps=30).recommended
    assert any(400 <= threshold <= 6500 for threshold in found.config.thresholds)
    assert found.time_gap < 1.05 and found.delay <= 1.0


def test_equal_documents_need_neither_waiting_nor_memory() -> None:
    found = tune(np.full(500, 512), WORKLOAD, CONFIG, steps=20).recommended
    assert found.config.s_max == CONTEXT and found.delay == 0 and found.time_gap == pytest.approx(1.0)


def test_tuning_is_deterministic_and_the_mapper_changes_nothing() -> None:
    def backwards(function, items):
        return reversed([function(item) for item in reversed(items)])

    first = tune(long_tailed(), WORKLOAD, CONFIG, packers=["steady"], steps=10)
    second = tune(long_tailed(), WORKLOAD, CONFIG, packers=["steady"], steps=10, mapper=backwards)
    assert first == second


def test_a_stated_s_max_is_never_exceeded() -> None:
    limited = replace(CONFIG, max_tokens_per_micro_batch=int(1.2 * CONTEXT))
    found = tune(long_tailed(), WORKLOAD, limited, packers=["steady"], steps=5)
    assert {p.config.s_max for p in found.points} == {CONTEXT, int(1.125 * CONTEXT), int(1.2 * CONTEXT)}


def test_the_pareto_front_is_not_beaten(result) -> None:
    assert pareto_front([point(1.2, 0.1), point(1.1, 0.5), point(1.15, 0.6), point(1.2, 0.2)]) == (
        point(1.1, 0.5),
        point(1.2, 0.1),
    )
    for best in result.pareto:
        assert not any(p.time_gap < best.time_gap and p.delay < best.delay for p in result.points)


def test_less_memory_is_preferred_within_half_a_percent() -> None:
    limits = Limits(1.0, None, 0.0)
    assert choose([point(1.000, 0.5, 2.0), point(1.004, 0.5, 1.125)], limits)[0].memory_factor == 1.125
    assert choose([point(1.000, 0.5, 2.0), point(1.006, 0.5, 1.125)], limits)[0].memory_factor == 2.0
    chosen, reason = choose([point(1.000, 0.5, 2.0), point(1.004, 0.5, 1.125)], limits)
    assert chosen.description in reason and "S_max 2 x context brings 0.0%" in reason


def test_limits_hold_and_an_impossible_one_is_said() -> None:
    points = [point(1.0, 2.0), point(1.1, 0.5, variation=0.3), point(1.2, 0.4, variation=0.01)]
    assert choose(points, Limits(1.0, None, 0.0))[0] == points[1]
    assert choose(points, Limits(1.0, 0.05, 0.0))[0] == points[2]
    chosen, reason = choose(points, Limits(0.1, None, 0.0))
    assert chosen == points[2] and reason.startswith("None of 3 settings kept the mean delay within 0.1 steps")


def test_the_result_becomes_json_and_settings_again(result) -> None:
    values = result.to_dict()
    assert PackingConfig.from_dict(values["recommended"]["config"]) == result.recommended.config
    assert len(values["points"]) == len(result.points)


def test_threshold_candidates_lie_within_the_data() -> None:
    lengths = long_tailed()
    candidates = threshold_candidates(lengths, CONTEXT)
    assert candidates == sorted(set(candidates)) and 4 <= len(candidates) <= 13
    assert all(CONTEXT // 32 <= c < lengths.max() for c in candidates)
    assert threshold_candidates(np.full(10, 3), CONTEXT) == [CONTEXT // 4]  # nothing long: something valid


def test_the_stream_repeats_the_data_in_other_orders() -> None:
    lengths = np.arange(1, 101)
    stream = length_stream(lengths, 2 * 5050, seed=1)
    assert sorted(stream[:100]) == sorted(stream[100:]) == list(lengths)
    assert list(stream[:100]) != list(stream[100:]) != list(lengths)
    assert list(length_stream(lengths, 5050, first_pass_stored=True)) == list(lengths)
    assert length_stream(lengths, 5000).sum() >= 5000 > length_stream(lengths, 5000)[:-1].sum()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"packers": ["greedy"]}, "packers to tune are wlb and steady"),
        ({"packers": []}, "packers to tune are wlb and steady"),
        ({"max_delay": -1.0}, "max_delay is a number of steps"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lengths_sample": np.zeros(3, dtype=int)}, "no document with tokens"),
        ({"lengths_sample": np.zeros(0, dtype=int)}, "no document with tokens"),
    ],
)
def test_bad_input_gets_a_sentence(changes, sentence) -> None:
    given = {"lengths_sample": long_tailed(100), "workload": WORKLOAD, "config": CONFIG, **changes}
    with pytest.raises(ValueError, match=sentence):
        tune(**given)


def test_an_s_max_that_cuts_documents_is_not_recommended() -> None:
    # Documents of 20,000 tokens fit whole at 1.25 x context; cut at 1.0 x they would do less work.
    random = np.random.default_rng(0)
    lengths = np.where(random.random(1500) < 0.15, 20_000, random.integers(200, 3000, 1500))
    config = PackingConfig(16_384, micro_batches_per_replica=4, pp_size=4)
    found = tune(lengths, AnalyticWorkload.from_crossover(24_576), config, packers=["steady"], steps=20)
    cutting = [p for p in found.points if p.config.s_max < 20_000]
    assert cutting and all(p.context_lost > 0.05 for p in cutting)
    assert found.recommended.config.s_max >= 20_000 and found.recommended.context_lost == 0
    assert all(point.context_lost == 0 for point in found.pareto)
