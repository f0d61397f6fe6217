"""What sharding asks of workload models: rows of kernel calls, and the exchange of keys and values."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_wlb.workload import HARDWARE_PRESETS, AnalyticWorkload, HardwareFigures, ProfiledWorkload, count_model
from hf_wlb.workload.analytic import SEGMENT_OVERHEAD_TOKENS
from hf_wlb.workload.curves import AttentionCurve, SegmentTable

from .test_workload import UNIT, llama_2_7b
from .test_workload_profile import METADATA, attention, collective, documents_only, full_profile, profiles

ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=8)


def test_rows_by_hand() -> None:
    model = AnalyticWorkload(2.0, 10.0, segment_overhead_tokens=3.0)
    # 2 queries of 3 and 4 keys, and 3 more queries' worth of all 4 keys; no linear work.
    assert model.segment([2], [4]).tolist() == [2 * (7 + 3 * 4)]
    # A whole document; a row that only steps over keys; nothing at all.
    assert model.segment([4, 0, 0], [4, 9, 0]).tolist() == [2 * (10 + 12), 0.0, 0.0]
    assert model.segment(np.zeros((0, 4), int), np.zeros((0, 4), int)).shape == (0, 4)
    assert model.segment(np.array([[1, 2]]), np.array([[1, 4]])).tolist() == [[8.0, 38.0]]


def test_sliding_rows_load_only_keys_within_reach() -> None:
    model = AnalyticWorkload(1.0, 0.0, ((10.0, 2),), segment_overhead_tokens=1.0)
    # Full: 199 + 200 pairs and 200 keys; sliding: 2 + 2 pairs and 2 + 2 keys.
    assert model.segment([2], [200]).tolist() == [399 + 200 + 10 * (4 + 4)]
    assert model.segment([1], [1]).tolist() == [1 + 1 + 10 * (1 + 1)]


@settings(deadline=None)
@given(ROWS, st.integers(1, 50))
def test_rows_without_overhead_are_chunks_without_linear_work(rows, window) -> None:
    queries, keys = np.array([q for q, _ in rows]), np.array([q + before for q, before in rows])
    model = AnalyticWorkload(0.3, 0.7, ((0.2, window),))
    prices = model.segment(queries, keys)
    assert prices == pytest.approx(model.chunk(queries, keys) - model.linear(queries), abs=1e-9)
    assert prices.dtype == np.float64
    # What a row wastes comes on top, and only where there is a query.
    wasteful = AnalyticWorkload(0.3, 0.7, ((0.2, window),), segment_overhead_tokens=4.0)
    wasted = wasteful.segment(queries, keys) - prices
    assert ((wasted > 0) == (queries > 0)).all()


@settings(deadline=None)
@given(st.integers(8, 100_000), st.integers(2, 8))
def test_a_document_in_chunks_costs_more_than_whole(length, chunks) -> None:
    model = AnalyticWorkload.from_crossover(24_576)
    ends = np.linspace(0, length, chunks + 1).astype(np.int64)
    whole = model.segment([length], [length])[0]
    cut = model.segment(np.diff(ends), ends[1:]).sum()
    assert cut > whole
    wasted = SEGMENT_OVERHEAD_TOKENS * (ends[1:].sum() - length) * model.attention_seconds_per_pair
    assert cut - whole == pytest.approx(wasted)


def test_short_chunks_waste_as_measured() -> None:
    """Pairs a second over 8192 keys follow q / (q + overhead)."""
    model = AnalyticWorkload(1.0, 0.0, segment_overhead_tokens=SEGMENT_OVERHEAD_TOKENS)
    q = np.array([64, 128, 256, 512])
    rates = (q * 8192 - q * (q - 1) / 2) / model.segment(q, np.full_like(q, 8192))
    assert rates == pytest.approx(q / (q + SEGMENT_OVERHEAD_TOKENS), rel=0.01)


def test_the_exchange_goes_by_tokens_and_ranks() -> None:
    model = AnalyticWorkload(1.0, 1.0, exchange_seconds_per_token=6.0)
    assert [model.exchange(10, ranks) for ranks in (1, 2, 3, 4)] == [0.0, 30.0, 40.0, 45.0]
    assert model.exchange(0, 4) == 0.0
    assert AnalyticWorkload.from_crossover(100, exchange_per_token=0.5).exchange(8, 2) == 2.0
    assert AnalyticWorkload.from_crossover(100).exchange(800, 2) == pytest.approx(8.0)


def test_the_exchange_of_llama_2_7b_by_hand() -> None:
    figures = HardwareFigures("made up", 1.0, 1.0, interconnect_bytes_per_second=5.0)
    # 32 layers, keys and values of 32 heads of 128 in 2 bytes; gathered once, reduced once.
    per_token = 32 * 2 * 4096 * 2 / 5.0
    assert AnalyticWorkload.from_config(llama_2_7b(), figures).exchange_seconds_per_token == per_token * 2
    again = AnalyticWorkload.from_config(llama_2_7b(), figures, gradient_checkpointing=True)
    assert again.exchange_seconds_per_token == per_token * 3
    grouped = AnalyticWorkload.from_config(llama_2_7b(num_key_value_heads=8), figures)
    assert grouped.exchange_seconds_per_token == pytest.approx(per_token * 2 / 4)
    shared = AnalyticWorkload.from_config(llama_2_7b(), figures, tp_size=4)
    assert shared.exchange_seconds_per_token == pytest.approx(per_token * 2 / 4)
    assert AnalyticWorkload.from_config(llama_2_7b(), UNIT).segment_overhead_tokens == SEGMENT_OVERHEAD_TOKENS


def test_the_presets_exchange_what_was_measured() -> None:
    """128K tokens of 8 KV heads, one layer, 4 GPUs: gathered in 1.28 ms, reduced in as long."""
    config = llama_2_7b(num_key_value_heads=8, num_hidden_layers=1)
    for name in ("h100", "h100-flash-attn-4"):
        seconds = AnalyticWorkload.from_config(config, name).exchange(131_072, 4)
        assert seconds == pytest.approx(2 * 1.28e-3, rel=0.1)
    assert (
        HARDWARE_PRESETS["cpu"].interconnect_bytes_per_second < HARDWARE_PRESETS["h100"].interconnect_bytes_per_second
    )


def test_keys_and_values_are_counted() -> None:
    assert count_model(llama_2_7b()).key_value_width == 32 * 2 * 4096
    assert count_model(llama_2_7b(num_key_value_heads=8)).layers[0].kv_width == 2 * 8 * 128
    latent = llama_2_7b(
        num_hidden_layers=2,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=20,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    # Expanded to every head before attention: a key of 28 and a value of 12 numbers.
    assert count_model(latent).key_value_width == 2 * 4 * (28 + 12)


@pytest.mark.parametrize("name", ["segment_overhead_tokens", "exchange_seconds_per_token"])
@pytest.mark.parametrize(("value", "error"), [(-1.0, ValueError), (math.inf, ValueError), ("3", TypeError)])
def test_bad_rates_of_sharding_get_a_sentence(name, value, error) -> None:
    with pytest.raises(error, match=name):
        AnalyticWorkload(1.0, 1.0, **{name: value})


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_interconnect_gets_a_sentence(rate) -> None:
    with pytest.raises(ValueError, match="interconnect_bytes_per_second of 'x' must be above 0 and finite"):
        HardwareFigures("x", 1.0, 1.0, interconnect_bytes_per_second=rate)


def test_what_sharding_asks_survives_saving(tmp_path) -> None:
    model = AnalyticWorkload(1.0, 2.0, segment_overhead_tokens=3.0, exchange_seconds_per_token=4.0)
    assert AnalyticWorkload.from_dict(model.to_dict()) == model
    others = [
        AnalyticWorkload(1.0, 2.0, segment_overhead_tokens=3.0, exchange_seconds_per_token=5.0),
        AnalyticWorkload(1.0, 2.0, segment_overhead_tokens=2.0, exchange_seconds_per_token=4.0),
    ]
    assert len({model.fingerprint, *(other.fingerprint for other in others)}) == 3


# ---- from a profile


def test_profiled_rows_come_back() -> None:
    profile = full_profile()
    del profile["layers"]
    model = ProfiledWorkload.from_dict(profile)
    prices = model.segment([15, 15, 15, 0, 0], [15, 115, 1015, 30, 0])
    assert prices.tolist() == pytest.approx([1.2, 8.0, 80.0, 0.0, 0.0], rel=0.012)


# One more key takes 32.5 x the time.
STEEP = [attention(2, 2, 1.0, 1.0), attention(2, 3, 1.0, 64.0)]


def tame(profile):
    """Its times brought near to one time per pair, within a factor of 8."""
    for sample in profile["attention"]:
        pairs = sample["q_len"] * (sample["kv_len"] - (sample["q_len"] - 1) / 2)
        for name in ("forward_seconds", "backward_seconds"):
            sample[name] = pairs * sample[name] ** 0.1
    return profile


@settings(deadline=None, max_examples=50)
@given(profiles() | profiles().map(tame), ROWS)
@example({**documents_only(), "attention": STEEP}, [(2, 1)])
@example({**documents_only(), "attention": STEEP, "layers": [{"count": 1, "window": 3}]}, [(2, 2), (3, 0)])
def test_profiled_rows_are_chunks_without_linear_work(profile, rows) -> None:
    queries, keys = np.array([(q, q + before) for q, before in [*rows, *at_samples(profile)]]).T
    prices = ProfiledWorkload.from_dict(profile).segment(queries, keys)
    assert np.isfinite(prices).all() and (prices[queries == 0] == 0).all()
    attention_alone = ProfiledWorkload.from_dict({**profile, "linear": []})
    assert prices == pytest.approx(attention_alone.chunk(queries, keys), rel=0.03, abs=0)


def at_samples(profile):
    """Rows, as in ``ROWS``, where prices have their kinks, and next to them."""
    samples = [(sample["q_len"], sample["kv_len"] - sample["q_len"]) for sample in profile["attention"]]
    return [(q + more, before + later) for q, before in samples for more in (0, 1) for later in (0, 1)]


@pytest.mark.parametrize(
    ("samples", "window", "row"),
    [
        ([(2, 2, 2.0), (2, 3, 65.0)], None, (2, 3)),
        ([(2, 2, 2.0), (2, 3, 65.0)], 3, (2, 3)),
        ([(300, 300, 2.0), (300, 301, 65.0)], None, (300, 301)),
        ([(100, 100, 2.0), (101, 101, 65.0)], None, (101, 101)),
        ([(1, 1, 1.0), (99, 200, 1e4), (100, 100, 5e3), (100, 201, 1e6)], None, (100, 201)),
        ([(1, 1, 1.0), (1, 8, 1775.0)], 257, (254, 257)),
    ],
    ids=["keys", "window", "long", "documents", "queries", "window on the grid"],
)
def test_steep_samples_are_not_read_off_the_grid(samples, window, row) -> None:
    curve = AttentionCurve(*zip(*samples, strict=True))
    table, grid = tables(curve, window)
    exact = float(curve.seconds(*np.array(row, dtype=np.float64), window))
    assert table.too_steep and table(*np.array(row)) == pytest.approx(exact)
    # Negative control: the grid alone would be off by more than it may.
    assert not grid.too_steep and grid(*np.array(row)) != pytest.approx(exact, rel=0.03)


def test_lengths_beyond_the_grid_are_not_read_off_it() -> None:
    curve = AttentionCurve([256, 2048], [256, 2048], [1.0, 200.0])  # bends after its last sample, behind the grid
    table, _ = tables(curve, None)
    far = np.array([2**20])
    assert not table.too_steep and table(far, far) == pytest.approx(curve.seconds(1.0 * far, 1.0 * far))
    # Negative control: the grid goes on as it ends.
    assert table._read(far, far) != pytest.approx(curve.seconds(1.0 * far, 1.0 * far), rel=0.03)


@pytest.mark.filterwarnings("error")
def test_times_of_any_size_are_priced_without_a_warning() -> None:
    for seconds in (1e-320, 1e300):
        table, _ = tables(AttentionCurve([2, 2], [2, 3], [seconds, seconds]), None)
        assert float(table(np.array([2]), np.array([3]))[0]) == pytest.approx(seconds, rel=1e-2)


@pytest.mark.parametrize("window", [None, 5, 90])
def test_usual_samples_are_read_off_the_grid(window) -> None:
    curve = AttentionCurve([2, 2, 70, 70, 100], [2, 9, 70, 333, 100], [2.0, 15.0, 900.0, 5e3, 1.5e3])
    table, grid = tables(curve, window)
    queries = np.arange(401)[:, None]
    keys = queries + np.arange(401)
    assert (prices := table(queries, keys)) == pytest.approx(curve.seconds(queries, keys, window), rel=0.03, abs=0)
    assert not table.too_steep and (prices == grid(queries, keys)).all()


def tables(curve, window):
    """The table, and one that was not told where the curve bends."""
    seconds = partial(curve.seconds, window=window)
    return SegmentTable(seconds, 1024, partial(curve.kinks, window=window)), SegmentTable(seconds, 1024)


def test_a_profile_where_short_chunks_are_slow_says_so() -> None:
    profile = documents_only()
    profile["attention"] = [
        attention(8, 8, 1.0, 2.0),
        attention(8, 64, 30.0, 60.0),  # 90 s for 484 pairs
        attention(64, 64, 20.0, 40.0),  # 60 s for 2080 pairs
    ]
    model = ProfiledWorkload.from_dict(profile)
    ends = np.arange(8, 65, 8)
    assert model.segment(np.full(8, 8), ends).sum() > 3 * model.segment([64], [64])[0]


def exchange_profile(**changes):
    profile = {**documents_only(), "metadata": {**METADATA, "model": {"kv_width": 5}}}  # 10 bytes a token
    profile["collectives"] = [
        collective("all_gather", 4, 1000, 1.0),
        collective("all_gather", 4, 100_000, 10.0),
        collective("reduce_scatter", 4, 1000, 3.0),
    ]
    return ProfiledWorkload.from_dict({**profile, **changes})


def test_the_profiled_exchange_is_a_gather_and_a_reduction_a_layer() -> None:
    model = exchange_profile()
    assert model.exchange(100, 4) == pytest.approx(1.0 + 3.0)
    assert model.exchange(1000, 4) == pytest.approx(math.sqrt(10.0) + 30.0)  # between samples; beyond them
    assert model.exchange(1, 4) == pytest.approx(4.0)  # a small one takes as long as the smallest measured
    assert model.exchange(0, 4) == model.exchange(100, 1) == 0.0
    assert exchange_profile(gradient_checkpointing=True).exchange(100, 4) == pytest.approx(2 * 1.0 + 3.0)
    layers = [{"count": 2, "window": None}, {"count": 1, "window": 7}]
    assert exchange_profile(layers=layers).exchange(100, 4) == pytest.approx(3 * 4.0)
    single = exchange_profile(metadata={**METADATA, "dtype": "torch.float32", "model": {"kv_width": 5}})
    assert single.exchange(50, 4) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 2, "holds no time of all_gather over 2 ranks; it holds all_gather over 4, reduce_scatter over 4"),
        ({"collectives": [collective("all_gather", 4, 9, 1.0)]}, 4, "holds no time of reduce_scatter over 4 ranks"),
        ({"collectives": []}, 4, "it holds no collectives at all"),
        ({"metadata": METADATA}, 4, "metadata does not say kv_width .* but None"),
        ({"metadata": {**METADATA, "model": {"kv_width": 0}}}, 4, "metadata does not say kv_width .* but 0"),
        ({"metadata": {**METADATA, "model": {"kv_width": 2.5}}}, 4, "metadata does not say kv_width .* but 2.5"),
        (
            {"metadata": {**METADATA, "dtype": "int4", "model": {"kv_width": 5}}},
            4,
            "dtype must be one of bfloat16, float16, float32, got 'int4'",
        ),
    ],
)
def test_an_exchange_that_was_not_measured_gets_a_sentence(changes, ranks, message) -> None:
    with pytest.raises(ValueError, match=message):
        exchange_profile(**changes).exchange(100, ranks)
