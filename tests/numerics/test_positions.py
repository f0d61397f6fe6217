"""Documents beyond what a model's positions are for, packed with others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, Phi3Config, Phi3ForCausalLM

from hf_wlb import WLBDataCollator
from hf_wlb.attention import document_attention_enabled, position_limit
from tests.support.tiny_llama import VOCABULARY, random_documents
from tests.support.training import trainer_of

ORIGINAL = 50
LONG = [1.5, 2.0, 3.0, 4.0]


def longrope(short: list[float]) -> Any:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=ORIGINAL,
        pad_token_id=0,
        initializer_range=0.5,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": short,
            "long_factor": LONG,
            "original_max_position_embeddings": ORIGINAL,
        },
    )
    return Phi3ForCausalLM(config).eval()


def loss_of(model: Any, *documents: list[int]) -> float:
    batch = WLBDataCollator()([{"input_ids": document} for document in documents])
    with torch.no_grad(), document_attention_enabled(model):
        return float(model(**batch).loss)


@pytest.mark.parametrize("short", [[1.0] * 4, LONG], ids=["two sets of factors", "one set"])
def test_why_there_is_a_limit(short: list[float]) -> None:
    """Beside a long document a short one is rotated otherwise than alone, unless there is one set of factors."""
    model = longrope(short)
    sizes = (60, 20)
    long, few = random_documents(sizes)
    alone = sum(loss_of(model, document) * (len(document) - 1) for document in (long, few)) / (sum(sizes) - 2)
    same = abs(loss_of(model, long, few) - alone) < 1e-5
    assert same == (short == LONG) == (position_limit(model.config).tokens == 128)


def test_longer_documents_are_refused_with_what_to_do(tmp_path: Path) -> None:
    rows = [{"input_ids": document} for document in random_documents((60, 20, 30, 40))]
    options: dict[str, Any] = {"context_length": 80, "max_steps": 1}
    sentence = r"a document of 60 tokens would be trained whole.*longrope.*max_document_tokens=50.*short_factor"
    with pytest.raises(ValueError, match=sentence):
        trainer_of(tmp_path, rows, longrope([1.0] * 4), **options)[0].train()
    trainer_of(tmp_path, rows, longrope([1.0] * 4), max_document_tokens=50, **options)[0].train()
    trainer_of(tmp_path, rows, longrope(LONG), **options)[0].train()


def test_a_stream_is_refused_when_such_a_document_comes(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"input_ids": document} for document in random_documents((20, 60, 30))])
    trainer, _ = trainer_of(tmp_path, rows.to_iterable_dataset(), longrope([1.0] * 4), context_length=80, max_steps=1)
    with pytest.raises(ValueError, match="has 60 tokens, more than the 50 positions"):
        trainer.train()


@pytest.mark.parametrize(
    ("rotary", "tokens"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 4096),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 4096),
        (
            {"rope_type": "longrope", "short_factor": [1], "long_factor": [2], "original_max_position_embeddings": 512},
            512,
        ),
    ],
)
def test_the_limit_by_rotary_settings(rotary: dict[str, Any], tokens: int) -> None:
    config = LlamaConfig(max_position_embeddings=4096)
    for found in (rotary, {"full_attention": rotary, "sliding_attention": {"rope_type": "default"}}):
        config.rope_parameters = found
        limit = position_limit(config)
        assert limit is not None and limit.tokens == tokens


def test_without_positions_there_is_no_limit() -> None:
    assert position_limit(BloomConfig()) is None
