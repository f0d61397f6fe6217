"""Measured profiles in simulated runs: their numbers are used, and what they lack is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_wlb.sharding import per_document
from hf_wlb.simulator.split import Split
from tests.support.simulated import LENGTHS, SLOW, model, profile


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_profiles_numbers_are_used(checkpointing: bool) -> None:
    found = model(Split(cp_size=2, pp_size=2), profile=profile(), gradient_checkpointing=checkpointing)
    linear, again = found.linear, int(checkpointing)
    assert linear.layers == (linear.layers[0],) * 4
    assert (linear.layers[0].forward, linear.layers[0].backward) == pytest.approx((0.3, 0.7 + 0.3 * again))
    assert (linear.head.forward, linear.head.backward) == pytest.approx((0.9, 0.2))
    assert (linear.embedding.forward, linear.embedding.backward) == pytest.approx((0.01, 0.05))
    assert found.workload.attention(1000) == pytest.approx(4 * 1000**2 * (9e-3 + 2e-3 * again))
    size = 500 * 16
    assert found.workload.exchange(500, 2) == pytest.approx(4 * ((1 + again) * size / 500 + size / 250))
    assert found.workload.micro_batch(LENGTHS) == pytest.approx(
        replace(profile(), gradient_checkpointing=checkpointing).micro_batch(LENGTHS)
    )
    one = model(Split(), profile=profile(), gradient_checkpointing=checkpointing).micro_batch(per_document([1000], 1))
    assert one.attention[0] == pytest.approx(4 * 1000**2 * (9e-3 + 2e-3 * again), rel=0.01)
    assert one.forward[0] == pytest.approx(4 * 1000**2 * 2e-3 + 1000 * (4 * 0.3 + 0.91), rel=0.01)


def test_what_a_profile_lacks_comes_from_the_cluster() -> None:
    counted = model(Split(cp_size=2))
    bare = model(Split(cp_size=2), profile=profile(linear=[], head=None, embedding=None, collectives=None))
    assert bare.linear == counted.linear
    assert bare.workload.exchange(500, 2) == counted.workload.exchange(500, 2)
    assert bare.workload.attention(1000) != counted.workload.attention(1000)
    # Measured among two neighbours: not what four take, nor two in different nodes.
    four, apart = Split(cp_size=4), replace(SLOW, gpus_per_node=1)
    assert model(four, profile=profile()).workload.exchange(500, 4) == model(four).workload.exchange(500, 4)
    wide = Split(cp_size=2, tp_size=2)
    other = profile(metadata={**profile().profile.metadata, "model": {"tp_size": 2, "heads": 1, "kv_width": 8}})
    assert model(wide, apart, profile=other).workload.exchange(500, 2) == model(wide, apart).workload.exchange(500, 2)
    assert model(wide, profile=other).workload.exchange(500, 2) != model(wide).workload.exchange(500, 2)


def test_a_measured_exchange_is_taken_whole() -> None:
    samples = [
        {"operation": "key_value_exchange", "group_size": 2, "bytes": n, "seconds": n / 100} for n in (100, 1_000_000)
    ]
    found = model(Split(cp_size=2), profile=profile(collectives=samples))
    assert found.workload.exchange(500, 2) == pytest.approx(4 * 500 * 16 / 100)


@pytest.mark.parametrize(
    ("split", "changes", "message"),
    [
        (Split(tp_size=2), {}, "measured with tp_size=1, but the split has tp_size=2; measure one with hf-wlb profile"),
        (Split(), {"hidden_size": 16}, "measured with hidden_size=8, but one of 1 tensor-parallel ranks .* has"),
        (Split(), {"vocab_size": 32}, "measured with vocab_size=16"),
        (Split(), {"num_key_value_heads": 2}, "measured with kv_heads=1"),
    ],
)
def test_profiles_of_something_else_are_refused(split: Split, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(split, changes=changes, profile=profile())


def test_a_profile_that_does_not_name_its_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not say how many layers .* but the model has 4 layers"):
        model(profile=profile(layers=None))
    model(changes={"num_hidden_layers": 1}, profile=profile(layers=None))
