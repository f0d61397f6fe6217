"""AnalyticWorkload: hand-computed prices, crossover lengths, chunks, and what it refuses."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.workload import HARDWARE_PRESETS, AnalyticWorkload, HardwareFigures, count_model, load_workload

RATES = st.floats(1e-3, 1e3)
WINDOWS = st.lists(st.tuples(RATES, st.integers(1, 500)), max_size=3, unique_by=lambda group: group[1])


@st.composite
def workloads(draw):
    return AnalyticWorkload(draw(RATES), draw(RATES), tuple(draw(WINDOWS)))


def test_prices_by_hand():
    model = AnalyticWorkload(2.0, 10.0)
    assert model.attention(4) == 20.0  # 10 pairs
    assert model.linear(4) == 40.0
    assert model.document(4) == 60.0
    assert model.document(0) == 0.0
    assert model.micro_batch([4, 1, 0]) == 60.0 + 12.0
    assert model.micro_batch([]) == 0.0
    assert model.chunk(2, 4) == 2 * 7 + 20.0  # the last two queries see 3 and 4 keys
    assert model.chunk(0, 4) == 0.0


def test_sliding_prices_by_hand():
    model = AnalyticWorkload(1.0, 0.0, ((10.0, 2),))
    assert model.attention(4) == 10 + 10 * (1 + 2 + 2 + 2)
    assert model.chunk(2, 4) == 7 + 10 * (2 + 2)
    assert model.groups == ((1.0, None), (10.0, 2))


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 400))
def test_sliding_pairs_are_the_brute_force_sum(length, window):
    model = AnalyticWorkload(0.0, 0.0, ((1.0, window),))
    assert model.attention(length) == sum(min(i, window) for i in range(1, length + 1))
    q_len = length // 3
    assert model.chunk(q_len, length) == sum(min(i, window) for i in range(length - q_len + 1, length + 1))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_arrays_give_what_ints_give(dtype):
    model = AnalyticWorkload(0.3, 0.7, ((0.1, 5),))
    lengths = np.array([[0, 1, 5], [6, 7, 4096]], dtype=dtype)
    prices = model.document(lengths)
    assert prices.dtype == np.float64
    assert prices.shape == lengths.shape
    assert prices.tolist() == [[model.document(int(d)) for d in row] for row in lengths]
    chunks = model.chunk(np.array([1, 2, 3], dtype=dtype), np.array([3, 3, 3], dtype=dtype))
    assert chunks.tolist() == [model.chunk(q, 3) for q in (1, 2, 3)]
    assert model.chunk([1, 2, 3], 3).tolist() == chunks.tolist()
    for price in (model.document(dtype(7)), model.chunk(dtype(2), dtype(7)), model.linear(dtype(7))):
        assert type(price) is float


def test_lengths_near_the_limit_do_not_overflow():
    model = AnalyticWorkload(1.0, 0.0, ((1.0, 2**31 - 1),))
    length = 2**31 - 1
    assert model.attention(np.array([length]))[0] == model.attention(length) == float(length * (length + 1))


@settings(deadline=None)
@given(workloads(), st.lists(st.integers(1, 4000), min_size=1, max_size=12))
def test_chunks_sum_to_the_document(model, chunk_lengths):
    ends = np.cumsum(chunk_lengths)
    total = model.chunk(np.array(chunk_lengths), ends).sum()
    assert total == pytest.approx(model.document(int(ends[-1])), rel=1e-12)
    # Negative control: chunks that forget the keys before them cost less.
    if len(chunk_lengths) > 1:
        assert model.chunk(np.array(chunk_lengths), np.array(chunk_lengths)).sum() < total


@settings(deadline=None)
@given(workloads(), st.integers(0, 10_000), st.integers(1, 10_000))
def test_longer_documents_cost_more(model, length, more):
    assert model.document(length + more) > model.document(length)
    assert model.chunk(length, length + more) >= model.document(length)
    assert model.chunk(length + more, length + more) > model.chunk(length, length + more)


@pytest.mark.parametrize("tokens", [1, 2, 49, 1000, 24_000, 24_576, 65_536, 131_072, 10_000_019])
def test_crossover_is_where_it_was_asked_for(tokens):
    model = AnalyticWorkload.from_crossover(tokens)
    assert model.crossover_length == tokens
    assert model.attention(tokens) == pytest.approx(model.linear(tokens), rel=1e-15)
    assert model.linear(tokens) == tokens
    assert model.attention(tokens + 1) > model.linear(tokens + 1)
    assert model.unit == "relative"


@settings(deadline=None)
@given(workloads())
def test_attention_equals_linear_work_at_the_crossover(model):
    length = model.crossover_length
    if length == 0:  # attention is heavier from the first token on
        assert model.attention(1) >= model.linear(1) * (1 - 1e-6)
        return
    below, above = math.floor(length), math.ceil(length)
    assert model.attention(below) <= model.linear(below) * (1 + 1e-6)
    assert model.attention(above) >= model.linear(above) * (1 - 1e-6)


def test_crossover_with_windows_by_hand():
    # Beyond the window a document of d has 4 d - 6 pairs; 3 (4 d - 6) = 9 d at d = 6.
    assert AnalyticWorkload(0.0, 9.0, ((3.0, 4),)).crossover_length == 6.0
    # At most 12 seconds a token of attention: 12 is never reached.
    assert AnalyticWorkload(0.0, 12.0, ((3.0, 4),)).crossover_length == math.inf
    assert AnalyticWorkload(0.0, 1.0).crossover_length == math.inf
    assert AnalyticWorkload(1.0, 0.0).crossover_length == 0.0
    # d (d + 1) / 2 + 4 d - 6 = 10 d, beyond the window: d = (11 + sqrt(169)) / 2.
    assert AnalyticWorkload(1.0, 10.0, ((1.0, 4),)).crossover_length == 12.0


@settings(deadline=None)
@given(workloads())
def test_round_trip_through_json(model):
    again = AnalyticWorkload.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again == model
    assert again.fingerprint == model.fingerprint
    assert load_workload(model.to_dict()) == model


def test_fingerprint_is_stable_and_tells_models_apart(tmp_path):
    model = AnalyticWorkload.from_crossover(24_576)
    assert model.fingerprint == "ca8c61fbe16594b3"
    assert AnalyticWorkload.from_crossover(24_577).fingerprint != model.fingerprint
    model.save(tmp_path / "workload.json")
    assert load_workload(tmp_path / "workload.json") == model
    text = (tmp_path / "workload.json").read_text()
    assert text.index("attention") < text.index("linear") < text.index("schema")


def test_micro_batch_of_many_documents_is_vectorised():
    lengths = np.random.default_rng(0).integers(1, 131_072, 4096)
    model = AnalyticWorkload(1e-9, 1e-5, ((1e-9, 4096),))
    assert model.micro_batch(lengths) == pytest.approx(math.fsum(map(model.document, lengths)), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.document(-1), ValueError, "between 0 and 2147483647 tokens, but -1 was given"),
        (lambda m: m.document(np.array([3, -2])), ValueError, "but -2 was given"),
        (lambda m: m.document(2**31), ValueError, "but 2147483648 was given"),
        (lambda m: m.document(2.0), TypeError, "must be integers .* float of dtype float64"),
        (lambda m: m.document(True), TypeError, "must be integers"),
        (lambda m: m.linear(np.array([1.5])), TypeError, "must be integers"),
        (lambda m: m.micro_batch([1.5]), TypeError, "must be integers"),
        (lambda m: m.chunk(5, 4), ValueError, "q_len must not exceed its kv_len"),
        (lambda m: m.chunk(np.array([1, 5]), np.array([4, 4])), ValueError, "must not exceed its kv_len"),
    ],
)
def test_bad_lengths_get_a_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call(AnalyticWorkload(1.0, 1.0))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1.0, 1.0), ValueError, "attention_seconds_per_pair must be finite and at least 0"),
        ((1.0, math.nan), ValueError, "linear_seconds_per_token must be finite"),
        (("1", 1.0), TypeError, "attention_seconds_per_pair must be a number, but '1'"),
        ((0.0, 0.0), ValueError, "rates are all 0"),
        ((1.0, 1.0, ((1.0, 0),)), ValueError, "window must be a whole number of at least 1, not 0"),
        ((1.0, 1.0, ((1.0, 8), (2.0, 8))), ValueError, r"each window once .* \[8, 8\]"),
        ((1.0, 1.0, (), "days"), ValueError, "unit must be one of seconds, relative, but 'days'"),
    ],
)
def test_bad_rates_get_a_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        AnalyticWorkload(*arguments)


def test_bad_dictionaries_get_a_sentence():
    good = AnalyticWorkload(1.0, 1.0).to_dict()
    with pytest.raises(ValueError, match=r"must be of schema 'hf_wlb.workload/1', but it is of 'x'"):
        AnalyticWorkload.from_dict({**good, "schema": "x"})
    with pytest.raises(ValueError, match=r"missing are \['unit'\], unknown are \['units'\]"):
        AnalyticWorkload.from_dict({("units" if key == "unit" else key): good[key] for key in good})
    with pytest.raises(ValueError, match="sliding_groups must be a list of"):
        AnalyticWorkload.from_dict({**good, "sliding_groups": [3]})
    with pytest.raises(ValueError, match="crossover length must be above 0"):
        AnalyticWorkload.from_crossover(0)


# ---- from a Transformers config


def llama_2_7b(**changes):
    attributes = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        **changes,
    }
    return SimpleNamespace(**{key: value for key, value in attributes.items() if value is not ...})


UNIT = HardwareFigures("unit", matmul_flops_per_second=1.0, attention_flops_per_second=1.0)
LAYER_7B = 4 * 4096 * 4096 + 3 * 4096 * 11008
HEAD_7B = 4096 * 32000


def test_llama_2_7b_by_hand():
    count = count_model(llama_2_7b())
    assert count.weights == 32 * LAYER_7B + HEAD_7B == 6_607_077_376  # the model less embedding and norms
    model = AnalyticWorkload.from_config(llama_2_7b(), UNIT)
    assert model.linear(1) == 6.0 * 6_607_077_376
    # 32 layers, QK and PV of width 4096, 2 FLOPs each, 1 + 2.5 forwards.
    assert model.attention(1) == 32 * 4 * 4096 * 3.5
    assert model.attention(3) == 6 * model.attention(1)


def test_checkpointing_repeats_the_layers_but_not_the_head():
    model = AnalyticWorkload.from_config(llama_2_7b(), UNIT, gradient_checkpointing=True)
    assert model.linear(1) == 8.0 * 32 * LAYER_7B + 6.0 * HEAD_7B
    assert model.attention(1) == 32 * 4 * 4096 * 4.5


def test_rates_and_tensor_parallelism_divide():
    figures = HardwareFigures("made up", 4.0, 2.0, 5.0, linear_overhead_seconds_per_token=7.0)
    model = AnalyticWorkload.from_config(llama_2_7b(), figures, tp_size=8)
    assert model.linear(1) == pytest.approx(6.0 * 6_607_077_376 / 4 / 8 + 7.0)
    assert model.attention(1) == pytest.approx(32 * 4 * 4096 * (1 / 2 + 2.5 / 5) / 8)


def test_grouped_queries_windows_and_plain_mlp():
    config = llama_2_7b(
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=1024,
    )
    count = count_model(config, gated_mlp=False)
    assert count.layers[0].weights == 2 * 4096 * 64 * (32 + 8) + 2 * 4096 * 11008
    assert [layer.window for layer in count.layers] == [1024, None, 1024]
    model = AnalyticWorkload.from_config(config, UNIT)
    assert model.groups == ((4 * 2048 * 3.5, None), (2 * 4 * 2048 * 3.5, 1024))


def test_experts_by_hand():
    config = llama_2_7b(
        model_type="deepseek_v3",
        num_hidden_layers=2,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )
    dense, sparse = count_model(config).layers
    attention = 4 * 4096 * 4096
    assert dense.weights == attention + 3 * 4096 * 11008
    assert sparse.weights == attention + 4096 * 16 + (4 + 1) * 3 * 4096 * 512


def test_presets_state_a_crossover():
    crossover = {name: AnalyticWorkload.from_config(llama_2_7b(), name).crossover_length for name in HARDWARE_PRESETS}
    assert set(crossover) == {"h100", "h100-flash-attn-4", "cpu"}
    assert 15_000 < crossover["h100"] < 25_000 < crossover["h100-flash-attn-4"] < 45_000


REQUIRED = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
REQUIRED += ["intermediate_size", "vocab_size", "model_type"]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [..., None])
def test_a_missing_attribute_is_named(name, value):
    with pytest.raises(ValueError, match=f"it has no {name}"):
        count_model(llama_2_7b(**{name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"\(model_type 'mamba'\).*not known here.*gated_mlp=True"),
        ({"num_experts_per_tok": 2}, "it has no num_local_experts"),
        ({"num_experts": 8}, "it has no num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "it has no qk_nope_head_dim"),
        ({"sliding_window": 512}, "it has no layer_types"),
        ({"layer_types": ["full_attention"]}, "has 1 entries for num_hidden_layers=32"),
        ({"layer_types": ["chunked_attention"] * 32}, "hold chunked_attention; only full_attention"),
        ({"layer_types": ["sliding_attention"] * 32}, "it has no sliding_window"),
        ({"num_attention_heads": 30}, "no multiple of its num_attention_heads 30; set head_dim"),
        ({"hidden_size": -4}, "hidden_size of .* must be a whole number of at least 1, not -4"),
        ({"vocab_size": 2.5}, "vocab_size of .* must be a whole number of at least 1, not 2.5"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_layer_types": ["sparse"]}, "has 1 entries"),
    ],
)
def test_incomplete_configs_get_a_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        AnalyticWorkload.from_config(llama_2_7b(**changes))


def test_bad_hardware_and_sizes_get_a_sentence():
    with pytest.raises(ValueError, match="no hardware figures called 'b200'; known are h100"):
        AnalyticWorkload.from_config(llama_2_7b(), "b200")
    for tp_size in (0, 3, 2.0, True):
        with pytest.raises(ValueError, match="tp_size must divide the 32 attention heads"):
            AnalyticWorkload.from_config(llama_2_7b(), tp_size=tp_size)
    with pytest.raises(ValueError, match="attention_flops_per_second of 'x' must be above 0"):
        HardwareFigures("x", 1.0, 0.0)
    with pytest.raises(ValueError, match="linear_overhead_seconds_per_token of 'x' must be at least 0"):
        HardwareFigures("x", 1.0, 1.0, linear_overhead_seconds_per_token=-1.0)
