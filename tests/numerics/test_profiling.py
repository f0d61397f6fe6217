"""Profiling: what is measured, that every call holds what it says, and that a profile comes out that can be read."""

import itertools
import time
from functools import partial
from itertools import pairwise

import pytest
import torch

from hf_wlb.attention.kernels import ReferenceKernel
from hf_wlb.profiling import (
    AttentionShape,
    Stopwatch,
    assemble_profile,
    attention_points,
    median_seconds,
    time_attention,
)
from hf_wlb.workload import ProfiledWorkload
from tests.support.spawn import run_distributed

CPU = torch.device("cpu")
SHAPE = AttentionShape(heads=4, kv_heads=2, head_size=8, dtype=torch.float32)


class Clock:
    """A clock that stands still while nobody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What everything is timed by."""
    own = Clock()
    monkeypatch.setattr("hf_wlb.profiling.timing.time", own)
    return own


class SpyKernel(ReferenceKernel):
    """Notes every forward's segments, and takes as long by the clock as it is told to."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.calls: list[tuple[list[int], list[int], torch.Size]] = []
        self.backwards = 0
        self.seconds = seconds

    def forward(self, q, k, v, segments, options):
        self.calls.append((segments.q.diff().tolist(), segments.k.diff().tolist(), q.shape))
        self.clock.sleep(self.seconds)
        return super().forward(q, k, v, segments, options)

    def backward(self, dout, q, k, v, out, lse, segments, options):
        self.backwards += 1
        self.clock.sleep(2 * self.seconds)
        return super().backward(dout, q, k, v, out, lse, segments, options)


def test_points_are_documents_and_chunks_that_end_no_later_than_the_longest() -> None:
    points = attention_points()
    assert points == sorted(set(points))
    assert all(1 <= q <= kv <= 131_072 for q, kv in points)
    documents = [q for q, kv in points if q == kv]
    assert documents[0] <= 128 and documents[-1] == 131_072
    assert max(b / a for a, b in pairwise(documents)) <= 4
    assert {q for q, kv in points if q < kv} <= set(documents)  # a chunk's growth starts from a document
    assert (16_448, 131_072) in points
    assert len(points) < 60


def test_a_call_is_full_of_equal_pieces_and_one_piece_is_written_down(clock: Clock) -> None:
    kernel = SpyKernel(clock, seconds=0.004)
    points = [(16, 16), (16, 64), (100, 100)]
    samples = time_attention(kernel, SHAPE, points, CPU, queries_per_call=64, keys_per_call=128, repeats=3)
    assert [(s["q_len"], s["kv_len"]) for s in samples] == points
    shapes = [call for index, call in enumerate(kernel.calls) if index % 4 == 0]
    assert [(q, k) for q, k, _ in shapes] == [([16] * 4, [16] * 4), ([16] * 2, [64] * 2), ([100], [100])]
    assert len(kernel.calls) == kernel.backwards == 3 * 4
    for sample, pieces in zip(samples, (4, 2, 1), strict=True):
        assert sample["forward_seconds"] == pytest.approx(0.004 / pieces)
        assert sample["backward_seconds"] == pytest.approx(0.008 / pieces)


@pytest.mark.parametrize(("seconds", "measured"), [(0.0, 50), (0.01, 3), (0.002, 9)])
def test_a_slow_point_is_measured_three_times_at_least(clock: Clock, seconds: float, measured: int) -> None:
    kernel = SpyKernel(clock, seconds)
    time_attention(kernel, SHAPE, [(4, 4)], CPU, queries_per_call=4, repeats=50, seconds_per_point=0.05)
    assert len(kernel.calls) == 1 + measured  # until more than 0.05 s are over


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least as many keys, got \(5, 4\)"):
        time_attention(ReferenceKernel(), SHAPE, [(5, 4)], CPU)


def test_a_profile_of_attention_alone_is_read_back(tmp_path) -> None:
    points, ticks = attention_points(64), itertools.count(1)

    def timer(forward, backward):
        tick = 1e-3 * next(ticks)  # points come in their order
        return tick, 2 * tick

    samples = time_attention(ReferenceKernel(), SHAPE, points, CPU, queries_per_call=64, keys_per_call=64, timer=timer)
    profile = assemble_profile(SHAPE, "reference", CPU, reversed(samples))
    assert profile["metadata"]["model"]["kv_width"] == 2 * (8 + 8)
    assert profile["metadata"]["dtype"] == "float32" and profile["metadata"]["versions"]["torch"] == torch.__version__
    model = ProfiledWorkload.from_dict(profile)
    model.save(tmp_path / "profile.json")
    assert ProfiledWorkload.load(tmp_path / "profile.json") == model
    last = samples[-1]
    assert model.attention(64) == pytest.approx(last["forward_seconds"] + last["backward_seconds"], rel=1e-6)
    assert model.linear(64) == 0.0


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="3 does not divide 8"):
        AttentionShape(8, 3, 16)
    with pytest.raises(ValueError, match="must be at least 1"):
        AttentionShape(8, 8, 0)


def test_random_inputs_depend_on_the_seed_alone() -> None:
    first, again, other = (SHAPE.random(3, 5, CPU, seed) for seed in (1, 1, 2))
    assert [tuple(t.shape) for t in first] == [(3, 4, 8), (5, 2, 8), (5, 2, 8), (3, 4, 8)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_the_stopwatch_meets_first_and_forgets_what_it_gave(clock: Clock) -> None:
    watch, order = Stopwatch(CPU), []
    watch.start(lambda: (order.append("meet"), clock.sleep(0.5)))
    clock.sleep(0.25)
    watch.stop()
    watch.start()
    watch.stop()
    assert order == ["meet"] and watch.take() == [0.25, 0.0]
    assert watch.take() == []


def test_time_is_the_hosts_on_a_cpu() -> None:
    watch = Stopwatch(CPU)
    watch.start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.002:
        pass
    watch.stop()
    assert watch.take()[0] >= 0.002  # a busy machine takes longer


def test_the_median_leaves_warm_ups_out(clock: Clock) -> None:
    pauses = iter([0.5, 0.5, 0.125, 0.125, 0.5])
    assert median_seconds(lambda: clock.sleep(next(pauses)), device=CPU, repeats=3, warmups=2) == 0.125
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        median_seconds(lambda: None, device=CPU, repeats=0)


def measure_together(rank: int, world_size: int) -> list[dict[str, object]]:
    from hf_wlb.attention.context import AttentionContext
    from hf_wlb.parallel import ProcessGroupExchange
    from hf_wlb.parallel.collective_times import time_collectives
    from hf_wlb.profiling import time_exchange

    timer = partial(median_seconds, device=CPU, repeats=1, warmups=0)
    bare = time_collectives([1000, 64], timer, CPU, dtype=torch.float32)
    context = AttentionContext(exchange=ProcessGroupExchange(), kv_head_groups=2)
    return bare + time_exchange(context, SHAPE, [30, 100], CPU, repeats=1)


def test_collectives_are_the_same_samples_on_all_ranks_and_price_an_exchange() -> None:
    first, second = run_distributed(measure_together, 2)
    assert first == second
    assert [(s["operation"], s["group_size"], s["bytes"]) for s in first] == [
        ("all_gather", 2, 64),
        ("all_gather", 2, 1000),
        ("reduce_scatter", 2, 64),
        ("reduce_scatter", 2, 1000),
        ("key_value_exchange", 2, 32 * 32 * 4),
        ("key_value_exchange", 2, 100 * 32 * 4),
    ]
    documents = [{"q_len": 4, "kv_len": 4, "forward_seconds": 1e-3, "backward_seconds": 2e-3}]
    model = ProfiledWorkload.from_dict(assemble_profile(SHAPE, "reference", CPU, documents, collectives=first))
    slowest = max(sample["seconds"] for sample in first[-2:])  # one that took less than a smaller one is lifted to it
    assert model.exchange(100, 2) == pytest.approx(slowest)
