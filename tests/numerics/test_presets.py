import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_wlb.presets import MODEL_PRESETS, preset_config

# Millions of parameters: Llama-2-7B and Llama-3-70B have exactly these; the others follow from their shapes.
PARAMETERS = {"tiny": 0.230, "550M": 557.774, "1B": 1235.814, "7B": 6738.416, "30B": 30406.778, "70B": 70553.706}
PROMISED = {"550M": 550.0, "1B": 1236.0, "7B": 7000.0, "30B": 30000.0, "70B": 70000.0}


def count_parameters(config: LlamaConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", list(MODEL_PRESETS))
def test_parameter_counts(name: str) -> None:
    millions = count_parameters(preset_config(name)) / 1e6
    assert millions == pytest.approx(PARAMETERS[name], abs=0.001)
    if name in PROMISED:
        assert millions == pytest.approx(PROMISED[name], rel=0.05)


def test_every_preset_is_counted() -> None:
    assert set(PARAMETERS) == set(MODEL_PRESETS)


def test_shapes_named_in_the_issue() -> None:
    config = preset_config("550M")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (1280, 24, 20)
    assert config.intermediate_size == 3456
    config = preset_config("30B")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (7168, 48, 56)
    assert config.intermediate_size == 19456
    config = preset_config("70B")
    assert (config.num_key_value_heads, config.vocab_size) == (8, 128256)


@pytest.mark.parametrize("name", list(MODEL_PRESETS))
def test_heads_divide_the_width(name: str) -> None:
    config = preset_config(name)
    assert config.head_dim * config.num_attention_heads == config.hidden_size
    assert config.num_attention_heads % config.num_key_value_heads == 0


def test_sizes_given_replace_the_presets_own() -> None:
    config = preset_config("tiny", vocab_size=300, max_position_embeddings=77)
    assert (config.vocab_size, config.max_position_embeddings) == (300, 77)
    assert not config.use_cache
    assert config.eos_token_id is None


def test_tiny_runs_forward() -> None:
    model = AutoModelForCausalLM.from_config(preset_config("tiny"))
    logits = model(input_ids=torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, 2048)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_names_ignore_case() -> None:
    assert preset_config("7b").hidden_size == 4096


def test_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ValueError, match=r"no model preset '8B'; the presets are tiny, 550M, 1B, 7B, 30B, 70B"):
        preset_config("8B")


@pytest.mark.parametrize("sizes", [{"vocab_size": 0}, {"max_position_embeddings": -1}])
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        preset_config("tiny", **sizes)


def test_importing_the_presets_imports_no_transformers() -> None:
    code = "import sys, hf_wlb.presets; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
