"""Swapping Trainer for WLBTrainer in a script: what its arguments, collator and counters then mean."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Phi3Config,
    TrainingArguments,
    default_data_collator,
)

from hf_wlb import WLBTrainer, WLBTrainingArguments
from hf_wlb.data.text import load_documents
from hf_wlb.data.tokenization import tokenize_documents, train_byte_level_bpe
from hf_wlb.presets import preset_config
from hf_wlb.trainer.swap import planned_arguments
from tests.support.scripts import run_script
from tests.support.source_tree import REPOSITORY
from tests.support.tiny_llama import random_documents, tiny_llama
from tests.support.training import rows_of, steps_by_epoch

DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)


def plain(folder: Path, **options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**settings, **options})


def test_plain_arguments_train_with_the_longest_document_as_context(tmp_path: Path, caplog: Any) -> None:
    rows = [{"input_ids": document} for document in random_documents([200, 130, 30, 5, 90, 61] * 4)]
    given = plain(tmp_path, gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2)
    before = dict(given.__dict__)
    with caplog.at_level(logging.WARNING):
        trainer = WLBTrainer(tiny_llama(), given, DataCollatorWithFlattening(), rows)
    assert given.__dict__ == before  # the script's own object is left alone
    assert isinstance(trainer.args, WLBTrainingArguments)
    assert (trainer.args.context_length, trainer.args.per_device_train_batch_size) == (256, 1)
    assert (trainer.args.learning_rate, trainer.args.num_train_epochs) == (1e-2, 2)
    said = "\n".join(caplog.messages)
    assert "one packed micro-batch of about 256 tokens at a time" in said
    assert "instead of 8 padded rows, and 2 of them per step" in said
    assert "data_collator DataCollatorWithFlattening is replaced by WLBDataCollator" in said
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == sum(steps_by_epoch(trainer))


def test_documents_that_the_model_has_no_positions_for_are_split(tmp_path: Path, caplog: Any) -> None:
    rows = rows_of([100, 90, 30, 5, 40, 61] * 4)
    config = preset_config("tiny", vocab_size=128, max_position_embeddings=48)
    tiny = AutoModelForCausalLM.from_config(config)
    tiny.save_pretrained(tmp_path / "model")
    for model in (tiny, config, str(tmp_path / "model"), tmp_path / "model"):
        caplog.clear()
        trainer = WLBTrainer(model, plain(tmp_path, max_steps=2, gradient_accumulation_steps=2), train_dataset=rows)
        assert (trainer.args.context_length, trainer.args.max_document_tokens) == (128, 48)
        assert "Documents of more than 48 tokens are split: the model has positions for 48" in caplog.text
    trainer.train()
    metrics = trainer.state.log_history[-1]
    assert metrics["packing_split"] > 0


def test_what_longrope_splits_is_not_put_down_to_the_positions(tmp_path: Path, caplog: Any) -> None:
    config = Phi3Config(
        max_position_embeddings=256,
        original_max_position_embeddings=48,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
        **{"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0},
    )
    planned = planned_arguments(plain(tmp_path), rows_of([100, 90]), config)
    assert (planned.context_length, planned.max_document_tokens) == (128, 48)
    assert "more than 48 tokens are split: Phi3Config rotates positions by other factors" in caplog.text
    assert "has positions for" not in caplog.text


def test_the_model_has_positions_for_all(tmp_path: Path, caplog: Any) -> None:
    """S_max keeps its default: what the sample did not show is split there."""
    trainer = WLBTrainer(tiny_llama(), plain(tmp_path), train_dataset=rows_of())
    assert trainer.args.max_document_tokens is None
    assert "are split" not in caplog.text


class MakesLabels:
    def __call__(self, features: Any) -> Any:
        raise AssertionError("is never called")


def test_collators_that_may_make_labels_are_refused(tmp_path: Path) -> None:
    own = MakesLabels()
    for collator in (own, own.__call__, lambda features: features):
        with pytest.raises(ValueError, match=r"would not be called.*Make the labels in the data set"):
            WLBTrainer(tiny_llama(), plain(tmp_path), collator, rows_of())
    masking: Any = DataCollatorForLanguageModeling.__new__(DataCollatorForLanguageModeling)
    masking.mlm = True
    with pytest.raises(ValueError, match=r"DataCollatorForLanguageModeling\(mlm=True\) masks tokens to predict"):
        WLBTrainer(tiny_llama(), plain(tmp_path), masking, rows_of())


def test_the_function_that_only_stacks_is_replaced(tmp_path: Path, caplog: Any) -> None:
    WLBTrainer(tiny_llama(), plain(tmp_path), default_data_collator, rows_of())
    assert "data_collator default_data_collator is replaced by WLBDataCollator" in caplog.text


def test_rows_may_be_any_mapping(tmp_path: Path) -> None:
    rows = [BatchEncoding(row) for row in rows_of()]
    assert WLBTrainer(tiny_llama(), plain(tmp_path), train_dataset=rows).args.context_length == 128


def test_without_arguments_it_is_trainers_default(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = WLBTrainer(tiny_llama(), train_dataset=rows_of())
    assert (trainer.args.output_dir, trainer.args.context_length) == ("tmp_trainer", 128)


def test_what_cannot_be_looked_at_needs_a_context_length(tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        r"no train_dataset with a length.*Give WLBTrainingArguments\(context_length": iter(rows_of()),
        "holds no documents with tokens": [{"input_ids": []}],
        "Row 0 of the train_dataset has no input_ids": [{"text": "a"}],
    }
    for sentence, rows in cases.items():
        with pytest.raises(ValueError, match=sentence):
            WLBTrainer(tiny_llama(), plain(tmp_path), train_dataset=rows)
    with pytest.raises(ValueError, match="got dict"):
        WLBTrainer(tiny_llama(), {}, train_dataset=rows_of())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "the step planner decides what trains together"),
        ({"dataloader_drop_last": True}, "would lose documents"),
        ({"auto_find_batch_size": True}, "lower max_tokens_per_micro_batch"),
    ],
)
def test_options_that_would_not_do_what_they_say_are_refused(options: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        WLBTrainer(tiny_llama(), plain(tmp_path, **options), train_dataset=rows_of())


def scripts() -> tuple[str, str]:
    """The README's script before and after the swap."""
    (diff,) = DIFF.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    lines = diff.splitlines()
    assert all(line[:1] in ("+", "-", " ", "") for line in lines)
    before, after = ("\n".join(line[1:] for line in lines if line[:1] not in (left_out,)) for left_out in ("+", "-"))
    return before, after


@pytest.mark.parametrize("which", [0, 1])
def test_the_readmes_script_runs_before_and_after_the_swap(which: int, tmp_path: Path) -> None:
    script = scripts()[which]
    assert ("WLBTrainer(" in script) == bool(which)
    texts = load_documents(None).select(range(80))
    tokenizer = train_byte_level_bpe(texts["text"], vocab_size=300)
    documents = tokenize_documents(texts, tokenizer).filter(lambda row: row["length"] < 120)
    documents.remove_columns("length").save_to_disk(str(tmp_path / "documents"))
    tokenizer.save_pretrained(tmp_path / "model")
    config = preset_config("tiny", vocab_size=len(tokenizer))
    config.num_hidden_layers, config.max_position_embeddings = 1, 100
    assert max(documents["length"]) > config.max_position_embeddings  # Trainer trains these, too
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    ran = run_script("script.py", folder=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.vocab_size == len(tokenizer)
    assert ("WLBTrainer got plain TrainingArguments" in ran.stderr) == bool(which)
