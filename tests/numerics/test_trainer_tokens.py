"""What WLBTrainer says of tokens that its model does not know, and of steps without anything to learn."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_wlb.trainer import tokens
from hf_wlb.trainer.tokens import TargetWatch, Vocabulary
from tests.support.tiny_llama import VOCABULARY, tiny_llama
from tests.support.training import rows_of, train, trainer_of

LOGGER = "hf_wlb.trainer.tokens"


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def with_token(token: int) -> list[dict[str, list[int]]]:
    """Documents of which one ends with this token."""
    return [*rows_of((5, 6)), {"input_ids": [7, 8, token]}]


# ---- tokens that the model does not know ----


SENTENCES = {
    VOCABULARY: "the input_ids hold 128, but the model's vocabulary has 128 entries, 0 to 127. Tokenise .*own tokenizer"
    r".* model\.resize_token_embeddings\(len\(tokenizer\)\)",
    2**40: "the input_ids hold 1099511627776, but the model's vocabulary has 128 entries",
    -1: "the input_ids hold -1, but the model's vocabulary has 128 entries, 0 to 127. Token ids are not negative",
}


@pytest.mark.parametrize("token", SENTENCES)
@pytest.mark.parametrize("source", [list, Stream])
def test_an_unknown_token_is_named_before_the_model_sees_it(source: Any, token: int, tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, source(with_token(token)), max_steps=1, gradient_accumulation_steps=1)
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, given, named: seen.append(int(named["input_ids"].max())), with_kwargs=True
    )
    with pytest.raises(ValueError, match=SENTENCES[token]):
        trainer.train()
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match=SENTENCES[token]):
            evaluate(with_token(token))
    assert seen == []
    _, recorder = train(tmp_path, source(with_token(VOCABULARY - 1)), max_steps=1, gradient_accumulation_steps=1)
    assert recorder.losses[0] > 0  # the last one there is


def test_without_the_check_it_is_an_error_of_the_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_outside", lambda *args, **kwargs: None)
    with pytest.raises(IndexError, match="index out of range"):
        train(tmp_path, with_token(VOCABULARY), max_steps=1)


def padded(rows: int) -> Any:
    """A Llama whose embedding has more rows than its configuration and its head."""
    model = tiny_llama()
    model.model.embed_tokens = torch.nn.Embedding(rows, model.config.hidden_size)
    return model


def test_the_rows_of_a_padded_embedding_are_entries(tmp_path: Path) -> None:
    rows: Any = [{"input_ids": [7, 8, 150, 9], "labels": [-100, 8, -100, 9]}]
    _, recorder = train(tmp_path, rows, padded(160), max_steps=1)
    assert recorder.losses[0] > 0
    with pytest.raises(ValueError, match="the labels hold 150, but the model's vocabulary has 128 entries"):
        train(tmp_path, [{"input_ids": [7, 8, 150, 9]}], padded(160), max_steps=1)
    with pytest.raises(ValueError, match="the input_ids hold 160, but the model's vocabulary has 160 entries"):
        train(tmp_path, with_token(160), padded(160), max_steps=1)


def test_entries_that_came_later_count(tmp_path: Path) -> None:
    model = tiny_llama()
    vocabulary, micro_batch = Vocabulary(model), {"input_ids": torch.tensor([[3, 150]])}
    with pytest.raises(ValueError, match="hold 150, but the model's vocabulary has 128 entries"):
        vocabulary.check(micro_batch, model)
    model.resize_token_embeddings(160)
    vocabulary.check(micro_batch, model)
    assert vocabulary.entries["input_ids"] == 160


def test_rows_count_and_not_what_the_configuration_says() -> None:
    model = tiny_llama()
    model.config.vocab_size = 200
    assert Vocabulary(model).entries == {"input_ids": VOCABULARY, "labels": VOCABULARY}


def test_adapters_and_a_trainable_embedding(tmp_path: Path) -> None:
    import peft

    for options in ({"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        trainer, _ = trainer_of(tmp_path, with_token(VOCABULARY), peft.get_peft_model(tiny_llama(), config))
        with pytest.raises(ValueError, match="hold 128, but the model's vocabulary has 128 entries"):
            trainer.train()


def test_a_label_that_is_no_token(tmp_path: Path) -> None:
    for label in (-1, VOCABULARY):
        rows: Any = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, label, 8]}]
        with pytest.raises(
            ValueError, match=rf"the labels hold {label}, but .* 0 to 127. Labels are token ids, or -100"
        ):
            train(tmp_path, rows, max_steps=1)
    rows[0]["labels"][2] = -100
    _, recorder = train(tmp_path, rows, max_steps=1)
    assert recorder.losses[0] > 0


def test_labels_are_the_business_of_a_loss_of_ones_own(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        assert (labels == 1000).any()
        return outputs.logits.square().mean()

    rows: Any = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 1000, 8]}]
    _, recorder = train(tmp_path, rows, max_steps=1, gradient_accumulation_steps=1, compute_loss_func=loss)
    assert recorder.losses[0] > 0


def test_nothing_is_read_back_from_a_device() -> None:
    model = tiny_llama()
    on_device = {name: torch.empty(1, 3, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    Vocabulary(model).check(on_device, model)  # a value of it would be an error


# ---- steps without targets ----


def masked(rows: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """No token of the documents from ``first`` on is to be learned."""
    return [
        {**row, "labels": [-100] * len(row["input_ids"]) if place >= first else row["input_ids"]}
        for place, row in enumerate(rows)
    ]


def warnings_of(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_the_first_step_without_targets_is_named_once_a_run(tmp_path: Path, caplog: Any) -> None:
    options = {"packer": "next-fit", "shuffle_documents": False, "num_train_epochs": 2}
    trainer, recorder = trainer_of(tmp_path, masked(rows_of((16,) * 8), first=4), **options)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer.train()
        (said,) = warnings_of(caplog)
        assert said.startswith("Step 3 has nothing to learn from: all of its labels are -100, and its loss is 0.")
        assert "prompts are masked whole" in said and "documents of one token" in said
    assert [loss == 0 for loss in recorder.losses] == [False, False, True, True] * 4


def test_documents_of_one_token_are_said_to_teach_nothing(tmp_path: Path, caplog: Any) -> None:
    _, recorder = train(tmp_path, rows_of((1, 1, 1)))
    assert recorder.losses == [0.0]
    assert [said[:29] for said in warnings_of(caplog)] == ["Step 1 has nothing to learn f"]


def test_steps_with_some_target_are_not_mentioned(tmp_path: Path, caplog: Any) -> None:
    rows = masked(rows_of((16,) * 8), first=0)
    for row in rows[::2]:  # in one micro-batch of every step, one token
        row["labels"][-1] = row["input_ids"][-1]
    train(tmp_path, rows, packer="next-fit", shuffle_documents=False)
    assert warnings_of(caplog) == []


def test_a_loss_of_ones_own_may_learn_from_other_things(tmp_path: Path, caplog: Any) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.square().mean()

    trainer, recorder = trainer_of(tmp_path, masked(rows_of((16,) * 4), first=0), compute_loss_func=loss, max_steps=1)
    trainer.train()
    assert recorder.losses[0] > 0 and warnings_of(caplog) == []


def test_only_one_process_says_so(caplog: Any) -> None:
    TargetWatch(warns=False).add(0, step=1)
    assert warnings_of(caplog) == []
