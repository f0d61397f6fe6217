"""The collator, the loader, packed rows and a stream in other people's training loops.

Each run's losses are held against the same documents computed one at a time, without packing, and trained by
plain SGD; the control at the end shows that this notices documents that see one another.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_wlb.data import StreamingPackedDataset, WLBDataCollator, WLBDataLoader, pack_dataset
from hf_wlb.data.tokenization import train_byte_level_bpe
from tests.support.documents import WORKLOAD, packing
from tests.support.tiny_llama import VOCABULARY, random_documents, reference_loss, tiny_llama

LENGTHS = [9, 4, 13, 1, 7, 18, 5, 11, 2, 16, 6, 8]
DOCUMENTS = random_documents(LENGTHS)
LEARNING_RATE = 0.05


def reference_losses(steps: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """Train on the steps' documents, each alone, by the mean over all predictions of a step."""
    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for documents in steps:
        loss = reference_loss(model, documents)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def documents_in(micro_batches: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Cut micro-batches into their documents again; dummies (without a single label) hold none."""
    found = []
    for micro_batch in micro_batches:
        ids, bounds = micro_batch["input_ids"][0].tolist(), micro_batch["cu_seq_lens_q"].tolist()
        pieces = [ids[a:b] for a, b in pairwise(bounds)]
        found += [piece for piece in pieces if any(piece)]
    return found


def arguments_for(folder: Path, kind: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        str(folder),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def close(losses: Sequence[float], expected: Sequence[float]) -> None:
    assert len(losses) == len(expected) >= 3
    torch.testing.assert_close(list(losses), list(expected), rtol=0, atol=2e-4)  # the log rounds to 4 digits


def groups(size: int, accumulation: int) -> list[list[list[int]]]:
    step = size * accumulation
    return [DOCUMENTS[i : i + step] for i in range(0, len(DOCUMENTS), step)]


def test_collator_in_a_plain_trainer(tmp_path: Path) -> None:
    from transformers import Trainer

    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    arguments = arguments_for(
        tmp_path,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=rows, data_collator=WLBDataCollator())
    close(losses_of(trainer), reference_losses(groups(2, 2)))


def test_collator_in_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    arguments = arguments_for(
        tmp_path,
        trl.SFTConfig,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = trl.SFTTrainer(
        tiny_llama(),
        arguments,
        train_dataset=rows,
        data_collator=WLBDataCollator(),
        processing_class=train_byte_level_bpe(["a b c"], 258),
    )
    close(losses_of(trainer), reference_losses(groups(2, 2)))


def accelerate_loop(loader: Any, steps: int, accumulation: int) -> tuple[list[float], list[list[list[int]]]]:
    """Train as a user of Accelerate writes it; return the losses and the documents of each step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen, iterator = [], [], iter(loader)
    for _ in range(steps):
        micro_batches = [next(iterator) for _ in range(accumulation)]
        # -100 at every document's start, so that no label is lost by the shift
        tokens = sum(int((m["labels"] != -100).sum()) for m in micro_batches)
        total = 0.0
        for micro_batch in micro_batches:
            loss = model(**micro_batch, num_items_in_batch=tokens).loss
            accelerator.backward(loss)
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seen.append(documents_in(micro_batches))
    return losses, seen


def test_collator_in_an_accelerate_loop() -> None:
    rows = [{"input_ids": document} for document in DOCUMENTS]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=WLBDataCollator())
    losses, seen = accelerate_loop(loader, 3, 2)
    assert seen == groups(2, 2)
    close(losses, reference_losses(seen))


def test_loader_in_an_accelerate_loop() -> None:
    rows = [{"input_ids": document} for document in DOCUMENTS]
    loader = WLBDataLoader(rows, packing(), WORKLOAD)
    steps = len(loader) // 2
    losses, seen = accelerate_loop(loader, steps, 2)
    assert sorted(document for step in seen for document in step) == sorted(DOCUMENTS)
    close(losses, reference_losses(seen))


def test_stream_in_a_plain_trainer(tmp_path: Path) -> None:
    from transformers import Trainer

    rows = [{"input_ids": document} for document in DOCUMENTS]
    expected = list(StreamingPackedDataset(rows, packing(), WORKLOAD))
    steps = [documents_in(expected[i : i + 2]) for i in range(0, len(expected), 2)]
    arguments = arguments_for(
        tmp_path,
        max_steps=len(steps),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        accelerator_config={"dispatch_batches": False},
        remove_unused_columns=False,
    )
    data = StreamingPackedDataset(rows, packing(), WORKLOAD)
    trainer = Trainer(tiny_llama(), arguments, train_dataset=data, data_collator=WLBDataCollator())
    close(losses_of(trainer), reference_losses(steps))


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_rows_in_a_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    from transformers import Trainer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    packed = pack_dataset(table, packing(), WORKLOAD)
    steps: list[list[list[int]]] = [[] for _ in range(packed.steps)]
    for row in packed:
        for index in row["document_indices"]:
            steps[row["step"]].append(DOCUMENTS[index])
    arguments = arguments_for(
        tmp_path, num_train_epochs=2, dataloader_num_workers=workers, **packed.training_arguments()
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=packed, data_collator=packed.data_collator())
    close(losses_of(trainer), reference_losses([*steps, *steps]))


def test_packed_rows_in_a_plain_trainer_resumed_in_mid_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), packing(), WORKLOAD)

    def run(folder: str, resume: str | None = None, **options: Any) -> list[float]:
        arguments = arguments_for(tmp_path / folder, num_train_epochs=2, **packed.training_arguments(), **options)
        trainer = Trainer(tiny_llama(), arguments, train_dataset=packed, data_collator=packed.data_collator())
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run("whole", save_strategy="steps", save_steps=2)
    resumed = run("resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    close(resumed, whole)


def test_packed_rows_shuffled_by_a_trainer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), packing(), WORKLOAD)
    options = {**packed.training_arguments(), "train_sampling_strategy": "random"}
    arguments = arguments_for(tmp_path, num_train_epochs=1, **options)
    trainer = Trainer(tiny_llama(), arguments, train_dataset=packed, data_collator=packed.data_collator())
    with pytest.raises(ValueError, match="train_sampling_strategy='sequential'"):
        trainer.train()


def test_control_documents_that_see_one_another_have_other_losses(tmp_path: Path) -> None:
    from transformers import Trainer

    def leaking(features: list[dict[str, Any]]) -> dict[str, Any]:
        out = WLBDataCollator()(features)
        return {"input_ids": out["input_ids"], "labels": out["labels"]}

    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    arguments = arguments_for(
        tmp_path, num_train_epochs=1, per_device_train_batch_size=4, train_sampling_strategy="sequential"
    )
    losses = losses_of(Trainer(tiny_llama(), arguments, train_dataset=rows, data_collator=leaking))
    with pytest.raises(AssertionError):
        close(losses, reference_losses(groups(4, 1)))
    assert max(max(document) for document in DOCUMENTS) < VOCABULARY
