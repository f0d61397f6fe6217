"""The counts read off Transformers configs, against the parameters of the models those configs build."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from hf_wlb.workload import AnalyticWorkload, HardwareFigures, count_model
from hf_wlb.workload.model_config import GATED_MLP_FAMILIES, PLAIN_MLP_FAMILIES

# What a family's default config leaves open, or what makes its test cover more (dense layers before experts,
# shared experts, sliding layers). Every family gets 4 layers.
OVERRIDES: dict[str, dict] = {
    "deepseek_v2": {"q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {"head_dim": 128},
    "granitemoeshared": {"shared_intermediate_size": 512},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen2_moe": {"decoder_sparse_step": 2},
}
FAMILIES = sorted(GATED_MLP_FAMILIES | PLAIN_MLP_FAMILIES)


def make_config(family: str, **more):
    return AutoConfig.for_model(family, **{"num_hidden_layers": 4, **OVERRIDES.get(family, {}), **more})


def build_on_meta(config, **kwargs):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **kwargs)


def weights_used_per_token(model, num_experts: int, num_chosen: int) -> int:
    """Elements of the matrices that one token is multiplied by; of stacked experts only the chosen share."""
    used = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied head multiplies, too
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, torch.nn.Embedding) or parameter.dim() < 2 or name.endswith("bias"):
            continue
        if parameter.dim() == 3:
            assert parameter.shape[0] == num_experts, name
            used += parameter[0].numel() * num_chosen
        else:
            used += parameter.numel()
    return used


def experts_of(config) -> tuple[int, int]:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    total = next((value for name in names if (value := getattr(config, name, None))), 0)
    names = ("num_experts_per_tok", "moe_k", "moe_topk")
    return total, next((value for name in names if (value := getattr(config, name, None))), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_weights_are_the_models_own(family):
    config = make_config(family)
    used = weights_used_per_token(build_on_meta(config), *experts_of(config))
    count = count_model(config)
    assert len(count.layers) == 4
    assert count.weights == used
    # Negative control: the other kind of MLP gives another number.
    assert count_model(config, gated_mlp=family in PLAIN_MLP_FAMILIES).weights != used


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128}
SMALL_GQA = {**SMALL, "num_key_value_heads": 2, "head_dim": 24}
SMALL_MLA = {**SMALL, "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
SMALL_MLA |= {"qk_rope_head_dim": 8, "v_head_dim": 20}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", SMALL_GQA),
        ("starcoder2", {**SMALL, "num_key_value_heads": 2}),
        ("gemma3_text", SMALL_GQA),
        ("gpt_neox", SMALL),
        ("minicpm3", SMALL_MLA),
        ("deepseek_v3", {**SMALL_MLA, "first_k_dense_replace": 4}),
    ],
)
def test_counted_flops_are_those_of_a_forward(family, sizes):
    """Torch counts a dense forward (the whole square of pairs): the quadratic part is attention's."""
    config = make_config(family, **sizes, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def flops(tokens: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
        return counter.get_total_flops()

    count = count_model(config)
    per_pair = sum(2 * (layer.qk_width + layer.v_width) for layer in count.layers)
    assert flops(40) - 2 * flops(20) == per_pair * (40**2 - 2 * 20**2)
    # The linear part is the weights, and the rotary table (positions times at most 12 frequencies, twice).
    rotary = flops(20) - per_pair * 20**2 - 2 * 20 * count.weights
    assert 0 <= rotary <= 2 * 2 * 20 * 12


KV_FAMILIES = [
    ("llama", SMALL_GQA),
    ("starcoder2", {**SMALL, "num_key_value_heads": 2}),
    ("gemma3_text", SMALL_GQA),
    ("gpt_neox", SMALL),
    ("gpt2", {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}),
    ("qwen3_moe", {**SMALL_GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ("minicpm3", SMALL_MLA),
    ("deepseek_v3", {**SMALL_MLA, "first_k_dense_replace": 4}),
]


@pytest.mark.parametrize(("family", "sizes"), KV_FAMILIES)
def test_counted_keys_and_values_are_those_that_reach_attention(family, sizes):
    """What context parallelism exchanges: keys and values as the model hands them over, heads not repeated."""
    config = make_config(family, **sizes, pad_token_id=0)
    widths = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        widths.append(key.shape[1] * key.shape[3] + value.shape[1] * value.shape[3])
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("kv_width_spy", spy)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kv_width_spy")
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)
    count = count_model(config)
    assert widths == [layer.kv_width for layer in count.layers]
    assert count.key_value_width == sum(widths)
    # Negative control: with heads repeated for every query head a grouped model would exchange more.
    repeated = sum(layer.qk_width + layer.v_width for layer in count.layers)
    grouped = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) < config.num_attention_heads
    assert (repeated > sum(widths)) if grouped else (repeated == sum(widths))


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", [None] * 4),
        ("mixtral", [None] * 4),
        ("gpt_oss", [128, None, 128, None]),
        ("gemma3_text", [4096] * 4),
        ("deepseek_v3", [None] * 4),
    ],
)
def test_windows_follow_the_layer_types(family, windows):
    assert [layer.window for layer in count_model(make_config(family)).layers] == windows


def test_mistral_slides_in_every_layer_and_qwen2_only_when_told():
    assert {layer.window for layer in count_model(make_config("mistral", sliding_window=512)).layers} == {512}
    assert {layer.window for layer in count_model(make_config("qwen2", sliding_window=512)).layers} == {None}
    config = make_config("qwen2", sliding_window=512, use_sliding_window=True, max_window_layers=3)
    assert [layer.window for layer in count_model(config).layers] == [None, None, None, 512]


def test_a_nested_text_config_is_entered():
    text = make_config("llama")
    assert count_model(SimpleNamespace(model_type="llava", text_config=text)) == count_model(text)


def test_from_config_prices_real_configs():
    figures = HardwareFigures("unit", 1.0, 1.0)
    workload = AnalyticWorkload.from_config(make_config("gpt_oss"), figures)
    count = count_model(make_config("gpt_oss"))
    assert workload.linear(1) == 6.0 * count.weights
    # Two full and two sliding layers of 64 heads of 64: 3.5 forwards of 4 FLOPs a pair and head element.
    assert workload.attention_seconds_per_pair == 2 * 4 * 64 * 64 * 3.5
    assert workload.sliding_groups == ((2 * 4 * 64 * 64 * 3.5, 128),)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "llama4_text", "falcon"])
def test_families_that_are_not_attention_plus_mlp_are_refused_by_name(family):
    with pytest.raises(ValueError, match=f"'{family}'.*is not known here"):
        count_model(AutoConfig.for_model(family))
