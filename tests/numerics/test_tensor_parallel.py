"""Which models can be split over how many ranks, what each rank gets, and what is said where it cannot be."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_wlb.parallel import TensorShard
from hf_wlb.parallel.tensor_parallel import check_tensor_parallel
from hf_wlb.parallel.tensor_parallel.plan import read_plan
from tests.numerics.test_families import build
from tests.support.tensor_parallel import FAMILIES


def model_of(name: str, **settings: Any) -> Any:
    family = FAMILIES[name]
    return build(family._replace(settings={**family.settings, **settings}))


def slices_of(model: Any, tp_size: int) -> list[dict[str, TensorShard]]:
    """By rank and parameter name."""
    return [
        {
            f"{planned.name}.{own}": shard
            for planned in read_plan(model, tp_size, rank).modules
            for own, shard in planned.shards.items()
        }
        for rank in range(tp_size)
    ]


@pytest.mark.parametrize(
    "name", ["llama, attention bias", "gemma3", "phi3", "qwen3_moe", "deepseek_v2, latent of own heads"]
)
def test_slices_make_the_whole(name: str) -> None:
    model = model_of(name)
    check_tensor_parallel(model, 4)
    ranks = slices_of(model, 4)
    assert ranks[0]
    for parameter_name, first in ranks[0].items():
        whole = model.get_parameter(parameter_name).detach()
        shards = [rank[parameter_name] for rank in ranks]
        assert [shard.index for shard in shards] == [rank * first.count // 4 for rank in range(4)]
        parts = [shard.take(whole) for shard in shards[:: 4 // first.count]]
        assert all(part.shape[first.dim] * first.count == whole.shape[first.dim] for part in parts)
        assert torch.equal(first.join(parts), whole)


def test_what_is_split_and_what_is_not() -> None:
    shards = slices_of(model_of("llama, attention bias"), 4)[3]
    layer = "model.layers.1.self_attn"
    assert shards[f"{layer}.q_proj.bias"] == TensorShard(0, (32,), 3, 4)
    assert shards[f"{layer}.k_proj.weight"] == TensorShard(0, (16,), 1, 2)  # two KV heads, two ranks each
    assert shards[f"{layer}.o_proj.weight"] == TensorShard(1, (32,), 3, 4)
    assert f"{layer}.o_proj.bias" not in shards and "model.norm.weight" not in shards
    assert shards["model.embed_tokens.weight"] == shards["lm_head.weight"] == TensorShard(0, (64,), 3, 4)
    experts = slices_of(model_of("mixtral"), 2)[1]
    assert experts["model.layers.0.mlp.experts.gate_up_proj"] == TensorShard(1, (40, 40), 1, 2)
    assert experts["model.layers.0.mlp.experts.down_proj"] == TensorShard(2, (40,), 1, 2)


def test_a_tied_head_is_split_like_the_embedding_whatever_the_plan_names() -> None:
    for missing in ("model.embed_tokens", "lm_head"):
        model = model_of("llama, attention bias")
        model.tp_plan = {name: style for name, style in model.tp_plan.items() if name != missing}
        shards = slices_of(model, 2)[0]
        assert shards["model.embed_tokens.weight"] == shards["lm_head.weight"]


def test_parameters_without_memory_will_do() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_of("qwen3_moe").config)
    check_tensor_parallel(model, 2)
    assert slices_of(model, 2) == slices_of(model_of("qwen3_moe"), 2)
    shard = slices_of(model, 2)[0]["model.layers.0.self_attn.q_proj.weight"]
    assert shard.take(model.model.layers[0].self_attn.q_proj.weight).shape == (16, 32)


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "heads": (
        "llama",
        {"vocab_size": 66},
        3,
        r"tp_size=3 does not divide the 4 attention heads of model.layers.0.self_attn of LlamaForCausalLM. Set "
        r"tp_size to 1, 2 or 4\.",
    ),
    "KV heads": (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6},
        4,
        r"tp_size=4 neither divides the 6 KV heads of model.layers.0.self_attn of LlamaForCausalLM nor is a multiple "
        r"of them. Set tp_size to 1, 2, 3, 6 or 12\.",
    ),
    "FFN": (
        "llama",
        {"intermediate_size": 42},
        4,
        r"tp_size=4 does not divide the 42 output features in model.layers.0.mlp.gate_proj.weight of LlamaForCausalLM. "
        r"Set tp_size to 1, 2, 3, 6, 7, 14, 21 or 42\.",
    ),
    "FFN that is packed and gathered": (
        "glm4",
        {"intermediate_size": 41},
        4,
        r"tp_size=4 does not divide the 82 output features in model.layers.0.mlp.gate_up_proj.weight of Glm4For",
    ),
    "experts": (
        "qwen3_moe",
        {"moe_intermediate_size": 22},
        4,
        r"tp_size=4 does not divide the 22 output features of each of the 2 matrices packed in "
        r"model.layers.0.mlp.experts.gate_up_proj of Qwen3MoeForCausalLM. Set tp_size to 1, 2, 11 or 22\.",
    ),
    "vocabulary": (
        "llama",
        {"vocab_size": 65},
        2,
        r"tp_size=2 does not divide the vocabulary of 65 rows \(model.embed_tokens.weight of LlamaForCausalLM\). Set "
        r"tp_size to 1, 5 or 13, or pad .* model.resize_token_embeddings\(pad_to_multiple_of=2\)",
    ),
    "no plan": ("gpt2", {}, 2, r"GPT2LMHeadModel has no tensor-parallel plan .* tp_size=2 .* model.tp_plan = "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_the_users_words(case: str) -> None:
    name, settings, tp_size, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        check_tensor_parallel(model_of(name, **settings), tp_size)


@pytest.mark.parametrize(
    ("name", "rule", "sentence"),
    [
        (
            "llama",
            {"model.layers.*.mlp.up_proj": "sequence_parallel"},
            r"LlamaForCausalLM makes model.layers.0.mlp.up_proj 'sequence_parallel', which is not supported; supported "
            r"are all_reduce, colwise, .* Set tp_size=1 for this model\.",
        ),
        (
            "llama",
            {"model.layers.*.mlp.act_fn": "colwise"},
            r"makes model.layers.0.mlp.act_fn 'colwise', which cannot be done to a SiLU",
        ),
        (
            "gpt_oss, sinks",
            {"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.experts.gate_up_proj": "colwise"},
            r"plan of GptOssForCausalLM does not say how to split model.layers.0.mlp.experts.gate_up_proj_bias",
        ),
        (
            "llama",
            {"model.layers.*.self_attn.k_proj": "mla_kv_a_proj"},
            r"model.layers.0.self_attn.k_proj of LlamaForCausalLM makes a rotary key.*qk_rope_head_dim",
        ),
        (
            "llama, attention bias",
            {"lm_head": "rowwise"},
            r"model.embed_tokens.weight and lm_head.weight of LlamaForCausalLM are one parameter \(tied\)",
        ),
    ],
)
def test_plans_that_cannot_be_done(name: str, rule: dict[str, str], sentence: str) -> None:
    model = model_of(name)
    model._tp_plan = {**model.tp_plan, **rule}
    with pytest.raises(ValueError, match=sentence):
        check_tensor_parallel(model, 2)


def test_adapters_quantized_weights_and_other_models() -> None:
    adapted = get_peft_model(model_of("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    for model in (adapted, adapted.base_model.model):
        with pytest.raises(ValueError, match=r"tp_size=2 cannot split adapters of PEFT .*merge_and_unload"):
            check_tensor_parallel(model, 2)
    quantized = model_of("llama")
    quantized.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(40, 32, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"cannot split the quantized weights of LlamaForCausalLM. Load it without"):
        check_tensor_parallel(quantized, 2)
    with pytest.raises(ValueError, match=r"needs a model of Transformers, .*; Linear is none"):
        check_tensor_parallel(torch.nn.Linear(2, 2), 2)
