"""Rows of a data set that would be trained otherwise than they say."""

from typing import Any

import datasets
import pytest
import torch

from hf_wlb import PackingConfig, pack_dataset
from hf_wlb.data import StreamingPackedDataset, WLBDataLoader
from hf_wlb.data.documents import read_tokens
from tests.support.documents import WORKLOAD
from tests.support.training import rows_of, trainer_of

CONFIG = PackingConfig(context_length=40, micro_batches_per_replica=1)
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")


def rows(**columns: Any) -> list[dict[str, Any]]:
    return [{"input_ids": [number] * 5, **columns} for number in range(1, 13)]


def refused_everywhere(given: list[dict[str, Any]], sentence: str) -> None:
    """By the loader of a list and of a table, by a stream, and by whatever packs a data set."""
    table = datasets.Dataset.from_list(given)
    for data in (given, table):
        with pytest.raises(ValueError, match=sentence):
            next(iter(WLBDataLoader(data, CONFIG, WORKLOAD)))
    with pytest.raises(ValueError, match=sentence):
        next(iter(StreamingPackedDataset(table.to_iterable_dataset(), CONFIG, WORKLOAD)))


def test_rows_that_were_packed_before_are_refused(tmp_path: Any) -> None:
    sentence = "holds 3 documents that were packed before"
    refused_everywhere(rows(seq_lengths=[2, 2, 1]), sentence)
    with pytest.raises(ValueError, match=sentence):
        trainer_of(tmp_path, datasets.Dataset.from_list(rows(seq_lengths=[2, 2, 1])))[0].train()


def test_positions_that_begin_again_are_refused() -> None:
    refused_everywhere(rows(position_ids=[0, 1, 0, 1, 2]), "holds 2 documents that were packed before")
    for positions in ([7, 8, 9, 7, 8], torch.tensor([0, 1, 2, 0, 1]), torch.tensor([[0.0, 1, 0, 1, 2]])):
        with pytest.raises(ValueError, match="holds 2 documents that were packed before"):
            read_tokens({"input_ids": [1] * 5, "position_ids": positions}, "Document 0")


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [[0, 1, 2, 2, 2], [0, 1, 1, 2, 2], [0, 0, 0, 1, 2]], None, []])
def test_positions_of_one_document_are_not(positions: Any) -> None:
    loader = WLBDataLoader(datasets.Dataset.from_list(rows(position_ids=positions)), CONFIG, WORKLOAD)
    assert next(iter(loader))["input_ids"].shape[1] % 5 == 0


def test_padded_rows_are_refused_as_such() -> None:
    padded = {"input_ids": [1] * 5, "attention_mask": [1, 1, 1, 0, 0], "position_ids": [0, 1, 2, 0, 0]}
    with pytest.raises(ValueError, match="is padded"):
        read_tokens(padded, "Document 0")


def test_rows_of_pack_dataset_are_refused(tmp_path: Any) -> None:
    packed = pack_dataset(datasets.Dataset.from_list(rows()), CONFIG, WORKLOAD)
    with pytest.raises(ValueError, match="is a row of pack_dataset"):
        pack_dataset(packed, CONFIG, WORKLOAD)
    for again in (packed, packed.to_list()):
        with pytest.raises(ValueError, match=r"is a row of pack_dataset.*packed\.data_collator\(\)"):
            trainer_of(tmp_path, again)[0].train()


def test_one_document_a_row_is_no_packing() -> None:
    loader = WLBDataLoader(datasets.Dataset.from_list(rows(seq_lengths=[5])), CONFIG, WORKLOAD)
    assert next(iter(loader))["input_ids"].shape[1] % 5 == 0


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_without_labels_is_refused(name: str) -> None:
    refused_everywhere(rows(**{name: [0, 0, 0, 1, 1]}), f"has no labels, but its {name} leaves tokens out")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_all_tokens_or_beside_labels_is_not(name: str) -> None:
    labelled = rows(**{name: [0, 0, 0, 1, 1], "labels": [-100, -100, -100, 7, 7]})
    for data in (rows(**{name: [1] * 5}), labelled):
        found = next(iter(WLBDataLoader(datasets.Dataset.from_list(data), CONFIG, WORKLOAD)))
        share = float((found["labels"] != -100).sum()) / found["labels"].numel()
        assert share == (0.4 if data is labelled else 0.8)


def test_other_labels_are_another_data_set() -> None:
    tokens = rows_of()
    masked = [{**row, "labels": [-100] * len(row["input_ids"])} for row in tokens]
    state = WLBDataLoader(masked, CONFIG, WORKLOAD).state_dict()
    WLBDataLoader(masked, CONFIG, WORKLOAD).load_state_dict(state)
    with pytest.raises(ValueError, match="belongs to another data set"):
        WLBDataLoader(tokens, CONFIG, WORKLOAD).load_state_dict(state)
