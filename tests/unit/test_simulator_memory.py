"""Memory of a stage, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.memory import OVERHEAD_BYTES, MemoryUse, stage_memory
from hf_wlb.simulator.split import Split
from hf_wlb.staging import StageLayout

K = 1024
LLAMA_8B = SimpleNamespace(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    tie_word_embeddings=False,
)
LAYER = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
VOCABULARY = 4096 * 128_256


def model(split: Split, config=LLAMA_8B, **options) -> StepModel:
    made = {"context_length": 64 * K, "gradient_checkpointing": True, **options}
    return StepModel.of(config, split, CLUSTERS["h100"], **made)


def test_stages_by_hand() -> None:
    found = model(Split(tp_size=2, cp_size=2, pp_size=3), layout=StageLayout((0, 12, 23, 32)))
    first, middle, last = (stage_memory(found, stage, 50_000, 20_000) for stage in range(3))
    assert first.states == 16 * (12 * LAYER + VOCABULARY) / 2
    assert middle.states == 16 * 11 * LAYER / 2
    assert last.states == 16 * (9 * LAYER + VOCABULARY) / 2
    assert (first.gathered, middle.gathered) == (LAYER + VOCABULARY, LAYER)
    # Per layer and token: 18 h + (8 f + 4 k) / 2 while it is computed, h in float32 that is kept.
    working = 20_000 * (18 * 4096 + (8 * 14_336 + 4 * 1024) / 2)
    assert middle.activations == pytest.approx(50_000 * 4 * 4096 * 11 + working)
    shared = model(Split(cp_size=2, pp_size=2, dp_size=2, fsdp=True), layout=StageLayout((0, 16, 32)))
    in_bf16 = stage_memory(shared, 0, 50_000, 20_000).activations
    assert in_bf16 == pytest.approx(50_000 * 2 * 4096 * 16 + 20_000 * 200_704)
    assert middle.exchange == pytest.approx(12 * 1024 / 2 * 40_000)
    assert first.overhead == OVERHEAD_BYTES
    kept = model(Split(pp_size=2), gradient_checkpointing=False, layout=StageLayout((0, 16, 32)))
    assert stage_memory(kept, 1, 30_000, 10_000).activations == pytest.approx(30_000 * 16 * 200_704)


def test_a_rank_exchanges_one_kv_head_at_least() -> None:
    eight, sixteen = (stage_memory(model(Split(tp_size=tp, cp_size=2)), 0, 1000, 1000) for tp in (8, 16))
    four = stage_memory(model(Split(tp_size=4, cp_size=2)), 0, 1000, 1000)
    assert eight.exchange == sixteen.exchange == four.exchange / 2


def test_experts_are_held_whole() -> None:
    config = SimpleNamespace(**{**vars(LLAMA_8B), "model_type": "mixtral"})
    config.num_local_experts, config.num_experts_per_tok = 8, 2
    dense, sparse = (stage_memory(model(Split(), shape), 0, 1000, 1000) for shape in (LLAMA_8B, config))
    assert sparse.states - dense.states == 16 * 32 * (7 * 3 * 4096 * 14_336 + 8 * 4096)
    assert dense.activations < sparse.activations < 2 * dense.activations


def test_the_sum() -> None:
    assert MemoryUse(1.0, 2.0, 3.0, 4.0, 5.0).total == 15
    assert replace(MemoryUse(1.0, 2.0, 3.0, 4.0), states=0.0).total == 9 + OVERHEAD_BYTES


def test_refusals() -> None:
    found = model(Split(pp_size=2))
    with pytest.raises(IndexError, match="There is no stage 2"):
        stage_memory(found, 2, 1000, 1000)
    with pytest.raises(ValueError, match="largest_tokens must lie between 0 and live_tokens=1000"):
        stage_memory(found, 0, 1000, 1001)
