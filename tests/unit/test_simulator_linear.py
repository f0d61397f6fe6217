"""Counts of a model's parts and their linear work, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_wlb.simulator.cluster import Group, Link, all_reduce_seconds
from hf_wlb.simulator.counts import ModelShape
from hf_wlb.simulator.split import Split
from tests.support.simulated import SLOW, SPARSE, config, model

# ---- counts ----


def test_parameters_and_widths_by_hand() -> None:
    shape = ModelShape.of(config())
    attention = 2 * 64 + 2 * 8 * 4  # q and o, k and v
    assert [layer.parameters for layer in shape.layers] == [attention + 3 * 8 * 12] * 4
    assert (shape.layers[0].ffn, shape.layers[0].gated, shape.hidden, shape.tied) == (12, True, 8, False)
    assert shape.stage_parameters(0, 2) == 2 * 480 + 16 * 8
    assert shape.stage_parameters(1, 3) == 2 * 480
    assert shape.stage_parameters(0, 4) == 4 * 480 + 2 * 16 * 8
    tied = ModelShape.of(config(tie_word_embeddings=True))
    assert tied.stage_parameters(0, 4) == 4 * 480 + 16 * 8  # one copy, but two where stages are apart
    assert tied.stage_parameters(0, 2) + tied.stage_parameters(2, 4) == 4 * 480 + 2 * 16 * 8


def test_experts_are_held_by_all_and_met_by_few() -> None:
    shape = ModelShape.of(config(**SPARSE))
    dense, sparse = shape.layers[0], shape.layers[3]
    assert (dense.ffn, dense.parameters) == (12, dense.count.weights)
    router = 8 * 8
    attention = 2 * 64 + 2 * 8 * 4
    assert sparse.parameters == attention + router + 8 * 3 * 8 * 10
    assert sparse.count.weights == attention + router + 2 * 3 * 8 * 10
    assert sparse.ffn == 2 * 10 + 2  # the router's 64 weights are less than 3 columns of 8


def test_a_plain_mlp_has_two_matrices() -> None:
    plain = ModelShape.of(config(model_type="starcoder2")).layers[0]
    assert (plain.gated, plain.ffn) == (False, 12)


def test_a_rank_has_one_kv_head_at_least() -> None:
    shape = ModelShape.of(config(num_attention_heads=4, num_key_value_heads=2))
    assert [shape.kv_width(shape.layers[0], tp) for tp in (1, 2, 4)] == [8, 4, 4]


# ---- linear work by hand ----


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("compiled", "moved"), [(True, (248, 344)), (False, (1032, 1904))])
def test_a_layer_by_hand(checkpointing: bool, compiled: bool, moved: tuple[int, int]) -> None:
    # Bytes: h = 8, q + k = 8 + 4, f = 12: 16 h + 4 (q + k) + 6 f and 22 h + 4 (q + k) + 10 f; eager 84, 20, 10 and
    # 166, 30, 18. Weights: 480 in 4000 tokens.
    layer = model(gradient_checkpointing=checkpointing, compiled=compiled).linear.layers[0]
    forward = 2 * 480 / 1e3 + (moved[0] + 6 * 480 / 4000) / 100
    backward = 4 * 480 / 1e3 + (moved[1] + 18 * 480 / 4000) / 100
    assert layer.forward == pytest.approx(forward)
    assert layer.backward == pytest.approx(backward + checkpointing * forward)


def test_embedding_and_head_by_hand() -> None:
    linear = model().linear
    assert linear.embedding.forward == pytest.approx(2 * 16 / 100)
    assert linear.embedding.backward == pytest.approx((3 * 16 + 16 * 128 / 4000) / 100)
    assert linear.head.forward == pytest.approx(6 * 128 / 1e3 + (32 + 6 * 16 + 24 * 128 / 4000) / 100)
    assert linear.head.backward == pytest.approx(3 * 32 / 100)
    # Neither is computed again.
    again = model(gradient_checkpointing=True).linear
    assert (again.embedding, again.head) == (linear.embedding, linear.head)


@pytest.mark.parametrize(("checkpointing", "reduces"), [(False, 4), (True, 6)])
def test_tensor_parallel_ranks_share_products_and_sum_hidden_states(checkpointing: bool, reduces: int) -> None:
    free = replace(SLOW, inside=Link(1e30, 0.0))
    split = Split(tp_size=2)
    layer, unlinked = (model(split, c, gradient_checkpointing=checkpointing).linear.layers[0] for c in (SLOW, free))
    one = all_reduce_seconds(SLOW, Group(2, 1), 4000 * 16) / 4000
    assert layer.total - unlinked.total == pytest.approx(reduces * one)
    products = replace(free, memory_bytes_per_second=1e30)
    alone = model(Split(), products, gradient_checkpointing=checkpointing).linear.layers[0]
    half = model(split, products, gradient_checkpointing=checkpointing).linear.layers[0]
    assert half.total == pytest.approx(alone.total / 2)
