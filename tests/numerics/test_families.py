"""Model families: packed equals alone for those that are accepted, and the others are refused by name."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_wlb.attention import check_isolation, document_attention_enabled
from hf_wlb.data import WLBDataCollator
from tests.support.oracle import gradients_of, loss_and_gradients, relative_error, worst_error
from tests.support.tolerances import MODEL, MODEL_EXPERTS, NEGATIVE_CONTROL_FACTOR

VOCABULARY = 64
WINDOW = 4  # shorter than the longest document below
LENGTHS = (6, 1, 11, 2)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DECODER = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
DECODER |= {"decoder_ffn_dim": 40, "encoder_layers": 1, "max_position_embeddings": 64, "is_decoder": True}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ALTERNATING = ["sliding_attention", "full_attention"]


class Family(NamedTuple):
    """A row of the table: the model type, what differs from COMMON, and whether it has experts."""

    kind: str
    settings: dict[str, Any]
    experts: bool = False
    common: dict[str, Any] = COMMON


ACCEPTED: dict[str, Family] = {
    "llama": Family("llama", {}),
    "llama, attention bias": Family("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2": Family("qwen2", {}),
    "qwen2, window": Family("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Family("qwen3", {}),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral, window": Family("mistral", {"sliding_window": WINDOW}),
    "gemma": Family("gemma", {}),
    "gemma2": Family("gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "layer_types": ALTERNATING}),
    "gemma3": Family("gemma3_text", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "phi3": Family("phi3", {"sliding_window": None}),
    "olmo": Family("olmo", {}),
    "olmo2": Family("olmo2", {}),
    "olmo3": Family("olmo3", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "granite": Family("granite", {"attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "glm4": Family("glm4", {}),
    "cohere2": Family("cohere2", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}),
    "exaone4": Family("exaone4", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "seed_oss": Family("seed_oss", {"attention_dropout": 0.0}),
    "arcee": Family("arcee", {}),
    "ernie4_5": Family("ernie4_5", {}),
    "hunyuan": Family("hunyuan_v1_dense", {}),
    "gpt_neox": Family("gpt_neox", {}),
    "gpt2": Family("gpt2", NO_DROPOUT, common=GPT2),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True),
    "qwen3_moe": Family(
        "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, experts=True
    ),
    "gpt_oss, sinks": Family(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": ALTERNATING},
        experts=True,
    ),
    "granitemoe": Family("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True),
    "deepseek_v3, latent": Family(
        "deepseek_v3",
        {
            **LATENT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "num_key_value_heads": 4,
        },
        experts=True,
    ),
}
REFUSED: dict[str, tuple[Family, str]] = {
    "bloom": (Family("bloom", {"n_head": 4, "n_layer": 2}), "BloomForCausalLM"),
    "falcon": (
        Family("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None}),
        "FalconForCausalLM",
    ),
    "stablelm": (Family("stablelm", {}), "StableLmForCausalLM"),
    "nemotron": (Family("nemotron", {}), "NemotronForCausalLM"),
    "mamba2": (
        Family("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
        "Mamba2ForCausalLM",
    ),
    "llama4": (
        Family(
            "llama4_text",
            {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 40, "attention_chunk_size": 8},
        ),
        "Llama4ForCausalLM has layers of type chunked_attention",
    ),
    "lfm2": (Family("lfm2", {"full_attn_idxs": [1]}), "Lfm2ForCausalLM has layers of type conv"),
    "qwen3_next": (
        Family(
            "qwen3_next",
            {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            | {"shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"]},
        ),
        "Qwen3NextForCausalLM has layers of type linear_attention",
    ),
    "phimoe, whose window is only in its mask": (
        Family("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
        "PhimoeForCausalLM has sliding_window=4 but no layer hands it to the attention function",
    ),
    "bart, which numbers positions by itself": (
        Family("bart", {}, common=DECODER),
        "gets other logits than alone in BartForCausalLM: the model numbers positions by itself",
    ),
    "roberta, whose positions begin elsewhere": (
        Family("roberta", {"is_decoder": True, "attention_probs_dropout_prob": 0.0, "head_dim": None}),
        "gets other logits than alone in RobertaForCausalLM",
    ),
    "llama, three-dimensional positions": (
        Family("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}),
        "LlamaForCausalLM uses three-dimensional position ids",
    ),
    "llama, attention dropout": (
        Family("llama", {"attention_dropout": 0.1}),
        r"LlamaForCausalLM has attention_dropout=0.1.*Set config.attention_dropout = 0",
    ),
    "gpt2 as it comes": (Family("gpt2", {}, common=GPT2), "GPT2LMHeadModel has attn_pdrop=0.1"),
}


def build(family: Family) -> Any:
    settings = {**family.common, **family.settings}
    if settings.get("head_dim", 0) is None:
        del settings["head_dim"]  # a property of that configuration
    config = AutoConfig.for_model(family.kind, **settings)
    torch.manual_seed(0)
    # The grouped matrix product that experts use by default knows no float64
    experts = {"experts_implementation": "eager"} if family.experts else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # larger weights than at initialisation: attention far from uniform, biases and sinks not 0
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def documents(first: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    if first:
        made[0] = [first] * len(made[0])
    return made


def packed(model: Any, rows: list[list[int]]) -> Any:
    with document_attention_enabled(model):
        return model(**WLBDataCollator()([{"input_ids": row} for row in rows]))


def packed_error(model: Any, expected: tuple[float, dict[str, torch.Tensor]], rows: list[list[int]]) -> float:
    model.zero_grad()
    loss = packed(model, rows).loss
    loss.backward()
    loss_error = relative_error(loss, torch.tensor(expected[0]))
    return max(loss_error, worst_error(gradients_of(model), expected[1]))


@pytest.mark.parametrize("name", ACCEPTED)
def test_packed_documents_equal_documents_alone(name: str) -> None:
    family = ACCEPTED[name]
    model = build(family)
    check_isolation(model)
    assert model.config._attn_implementation == "eager" and not model.training
    model = model.double()
    rows = documents()
    tolerance = MODEL_EXPERTS if family.experts else MODEL
    assert packed_error(model, loss_and_gradients(model, rows), rows) <= tolerance
    if not family.experts:  # experts see another mix of tokens, and may round differently
        with torch.no_grad():
            one, other = (packed(model.float(), documents(first)).logits for first in (5, 6))
        length = LENGTHS[0]
        assert torch.equal(one[:, length:], other[:, length:])
        assert not torch.equal(one[:, :length], other[:, :length])


def test_the_families_are_many() -> None:
    assert len({family.kind for family in ACCEPTED.values()}) >= 20


def test_the_documentation_lists_these_families() -> None:
    text = (Path(__file__).parents[2] / "docs" / "model_families.md").read_text()
    listed = {line.split("|")[1].strip().strip("`") for line in text.splitlines() if line.startswith("| `")}
    assert listed == {family.kind for family in ACCEPTED.values()}
    refused = {family.kind for name, (family, _) in REFUSED.items() if not name.startswith(("llama,", "gpt2"))}
    assert all(f"`{kind}`" in text.partition("## Refused")[2] for kind in refused)


def test_what_layers_ask_of_a_kernel() -> None:
    layers = check_isolation(build(ACCEPTED["gemma2"]))
    requests = [layer.request for layer in layers]
    assert [(r.head_size, r.value_head_size, r.sliding_window, r.softcap, r.grouped) for r in requests] == [
        (8, 8, True, True, True),
        (8, 8, False, True, True),
    ]
    assert {layer.shape for layer in layers} == {"4 heads and 2 KV heads of sizes 8 and 8"}
    (latent,) = {layer.request for layer in check_isolation(build(ACCEPTED["deepseek_v3, latent"]))}
    assert (latent.head_size, latent.value_head_size, latent.grouped) == (16, 12, False)


@pytest.mark.parametrize("wrong", ["documents that see each other", "a boundary off by one", "mean of means"])
def test_the_check_notices(wrong: str) -> None:
    model, rows = build(ACCEPTED["llama"]).double(), documents()
    expected = loss_and_gradients(model, rows)
    batch = WLBDataCollator()([{"input_ids": row} for row in rows])
    bounds = batch["cu_seq_lens_q"]
    if wrong == "documents that see each other":
        batch |= {"cu_seq_lens_q": torch.tensor([0, bounds[-1]]), "max_length_q": int(bounds[-1])}
    elif wrong == "a boundary off by one":
        bounds[2] += 1  # not the one before the document of one token, which has no loss
    model.zero_grad()
    with document_attention_enabled(model):
        if wrong == "mean of means":
            losses = [model(**WLBDataCollator()([{"input_ids": row}])).loss for row in rows if len(row) > 1]
            loss = torch.stack(losses).mean()
        else:
            loss = model(**batch).loss
    loss.backward()
    assert worst_error(gradients_of(model), expected[1]) > NEGATIVE_CONTROL_FACTOR * MODEL


def test_the_window_matters_here() -> None:
    family = ACCEPTED["mistral, window"]
    windowed = build(family)
    full = build(family._replace(settings={"sliding_window": None}))
    full.load_state_dict(windowed.state_dict())
    error = packed_error(full.double(), loss_and_gradients(windowed, documents()), documents())
    assert error > NEGATIVE_CONTROL_FACTOR * MODEL


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    family, sentence = REFUSED[name]
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=sentence):
        check_isolation(model.train())
    assert model.training and model.config._attn_implementation == before


def test_a_layer_that_mixes_documents_behind_the_interface_is_found() -> None:
    """What a convolution over the tokens does: attention gets its plan, and still documents leak."""
    model = build(ACCEPTED["llama"])
    model.model.layers[1].mlp.register_forward_hook(lambda layer, given, out: out + given[0].roll(1, dims=1))
    with pytest.raises(ValueError, match=r"changing one document changes the logits of another.*LlamaForCausalLM"):
        check_isolation(model)
