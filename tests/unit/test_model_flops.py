"""Model FLOPs counted by hand, and the peak by the device's name."""

from types import SimpleNamespace
from typing import Any

import pytest

from hf_wlb.workload.model_flops import ModelFlops, bf16_peak, check_peak

HIDDEN, LAYERS, VOCABULARY = 8, 2, 16
# q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 12; the head.
LAYER = 2 * 64 + 2 * 32 + 3 * 96
WEIGHTS = LAYERS * LAYER + HIDDEN * VOCABULARY
PAIR = 3 * 4 * 2 * 4  # 2 heads of size 4, forward and twice that backward


def config(**changes: Any) -> SimpleNamespace:
    settings = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 12,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
    }
    return SimpleNamespace(**{**settings, **changes})


def test_weights_and_pairs_of_a_small_model() -> None:
    flops = ModelFlops.from_config(config())
    assert flops.per_token == 6 * WEIGHTS
    assert flops.per_pair == ((LAYERS * PAIR, None),)
    assert flops.documents([3, 5]) == 6 * WEIGHTS * 8 + LAYERS * PAIR * (6 + 15)
    assert flops.documents([]) == 0


def test_documents_do_not_attend_to_each_other() -> None:
    flops = ModelFlops.from_config(config())
    assert flops.attention([500] * 8) * 7.9 < flops.attention([4000])
    assert flops.linear([500] * 8) == flops.linear([4000])


def test_sliding_windows_and_value_heads() -> None:
    mixed = config(
        model_type="gpt_oss", layer_types=["sliding_attention", "full_attention"], sliding_window=2, head_dim=4
    )
    flops = ModelFlops.from_config(mixed)
    assert dict((window, each) for each, window in flops.per_pair) == {2: PAIR, None: PAIR}
    assert flops.attention([4]) == PAIR * (10 + 7)
    latent = config(
        model_type="deepseek_v3", kv_lora_rank=4, q_lora_rank=None, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
    )
    assert ModelFlops.from_config(latent).per_pair == ((LAYERS * 3 * 2 * 2 * (6 + 3), None),)


def test_experts_count_where_they_are_chosen() -> None:
    mixture = config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    layer = LAYER - 3 * 96 + 2 * 3 * 96 + 8 * HIDDEN  # two experts and the router
    assert ModelFlops.from_config(mixture).per_token == 6 * (LAYERS * layer + HIDDEN * VOCABULARY)


def test_a_tied_head_counts_once() -> None:
    assert ModelFlops.from_config(config(tie_word_embeddings=True)) == ModelFlops.from_config(config())


def test_frozen_weights_and_adapters() -> None:
    lora = ModelFlops.from_config(config(), trainable_share=0, adapter_weights=10)
    assert lora.per_token == 4 * WEIGHTS + 6 * 10
    assert ModelFlops.from_config(config(), trainable_share=0.5).per_token == 5 * WEIGHTS


def test_a_million_long_documents_do_not_overflow() -> None:
    flops = ModelFlops(0.0, ((1.0, None),))
    assert flops.attention([2**31 - 1] * 8) == pytest.approx(8 * 2.0**61, rel=1e-6)


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="this family is not known here"):
        ModelFlops.from_config(config(model_type="mamba"))
    with pytest.raises(ValueError, match="trainable_share must lie between 0 and 1, but 2"):
        ModelFlops.from_config(config(), trainable_share=2)
    with pytest.raises(ValueError, match="adapter_weights must be at least 0"):
        ModelFlops.from_config(config(), adapter_weights=-1)
    with pytest.raises(ValueError, match="document lengths must lie between"):
        ModelFlops.from_config(config()).documents([-1])


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H200 NVL", False),
        ("NVIDIA GH200 480GB", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("cpu", False),
    ],
)
def test_peaks_by_name(name: str, known: bool) -> None:
    assert bf16_peak(name) == (989e12 if known else None)


@pytest.mark.parametrize("peak", [0, -1e12, float("nan"), float("inf")])
def test_a_peak_must_be_a_rate(peak: float) -> None:
    assert check_peak(312e12) == 312e12
    with pytest.raises(ValueError, match=r"The peak must be above 0 FLOP/s and finite"):
        check_peak(peak)
