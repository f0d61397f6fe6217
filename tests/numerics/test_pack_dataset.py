"""Packing beforehand: rows in step order, a collator that notices any other order, and a plain Trainer on top."""

import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.data import PackedDataset, WLBDataCollator, WLBDataLoader, pack_dataset
from hf_wlb.data.tokenization import train_byte_level_bpe
from tests.support.documents import WORKLOAD, all_tokens, marked_documents, packing, plain, tokens_of

LENGTHS = [3, 20, 1, 21, 7, 16, 2, 9, 40, 5, 5, 12, 1, 19, 8, 4, 6, 17, 3, 11]  # S_max is 20


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table_of(lengths) -> datasets.Dataset:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    columns = {"input_ids": [row["input_ids"] for row in marked_documents(lengths)]}
    return datasets.Dataset.from_dict(columns, features=features)


def packed_of(lengths=LENGTHS, config=None, **options) -> PackedDataset:
    return pack_dataset(table_of(lengths), packing() if config is None else config, WORKLOAD, **options)


def read(packed: PackedDataset, rank: int = 0, workers: int = 0, collator=None):
    """Read as accelerate shares rows out: every dp_size-th."""
    rows = torch.utils.data.Subset(packed, range(rank, len(packed), packed.dp_size))
    collator = packed.data_collator() if collator is None else collator
    return list(torch.utils.data.DataLoader(rows, 1, collate_fn=collator, num_workers=workers))


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_rows_are_the_loaders_micro_batches_replica_by_replica(dp_size: int) -> None:
    config = packing(dp_size, 2)
    packed = packed_of(LENGTHS, config, seed=3)
    assert len(packed) == packed.steps * 2 * dp_size
    for rank in range(dp_size):
        loader = WLBDataLoader(marked_documents(LENGTHS), config, WORKLOAD, seed=3, dp_rank=rank)
        assert [plain(m) for m in read(packed, rank)] == [plain(m) for m in loader]
    for number, row in enumerate(packed):
        assert row["row"] == number
        assert (row["step"] * 2 + row["micro_batch"]) * dp_size + row["replica"] == number
        assert sum(row["document_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        assert len(row["document_indices"]) == len(row["document_lengths"])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 7, 16, 19, 20, 21, 45]), max_size=15), st.integers(1, 2), st.booleans())
def test_every_token_once(lengths, dp_size, shuffle) -> None:
    packed = packed_of(lengths, packing(dp_size), shuffle=shuffle)
    found = [m for rank in range(dp_size) for m in read(packed, rank)]
    assert tokens_of(found) == all_tokens(lengths)


def test_no_documents_no_rows() -> None:
    packed = packed_of([])
    assert len(packed) == packed.steps == 0 and set(packed.column_names) >= {"input_ids", "row"}


def test_labels_and_boundaries() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [9, 8, 7]}, {"input_ids": [4, 5], "labels": [6, 5]}]
    config = packing(micro_batches=1)
    row = pack_dataset(datasets.Dataset.from_list(rows), config, WORKLOAD)[0]
    assert row["input_ids"] == [1, 2, 3, 4, 5] and row["labels"] == [-100, 8, 7, -100, 5]
    assert row["document_lengths"] == [3, 2] and row["document_indices"] == [0, 1]


def test_metadata_survives_the_disk(tmp_path) -> None:
    config = packing(2, 2, thresholds=(4, 8), packer="wlb")
    packed = packed_of(LENGTHS, config, seed=7)
    packed.save_to_disk(tmp_path / "packed")
    for loaded in (
        PackedDataset.load_from_disk(tmp_path / "packed"),
        PackedDataset.from_dataset(datasets.load_from_disk(tmp_path / "packed")),
    ):
        assert type(loaded) is PackedDataset
        assert loaded.config == config and (loaded.dp_size, loaded.gradient_accumulation_steps) == (2, 2)
        assert loaded.seed == 7 and loaded.report == packed.report and loaded.report.dropped == 0
        assert [plain(m) for m in read(loaded, 1)] == [plain(m) for m in read(packed, 1)]
    assert packed.report.documents == len(LENGTHS) and packed.report.split == 2


def test_text_is_tokenised() -> None:
    texts = ["def f(x):\n    return x\n" * n for n in (1, 2, 3)]
    tokenizer = train_byte_level_bpe(texts, 300)
    packed = pack_dataset(
        datasets.Dataset.from_dict({"content": texts}),
        packing(context=64),
        WORKLOAD,
        tokenizer=tokenizer,
        text_column="content",
        shuffle=False,
    )
    found = [token for row in packed for token in row["input_ids"]]
    expected = [token for t in texts for token in [*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]
    assert sorted(found) == sorted(expected)


def test_the_cache_follows_the_plan(monkeypatch) -> None:
    first = packed_of(LENGTHS)
    again = packed_of(LENGTHS)
    assert first.cache_files == again.cache_files
    for other in (packed_of(LENGTHS, seed=1), packed_of([*LENGTHS, 4]), packed_of(LENGTHS, packing(packer="wlb"))):
        assert other.cache_files != first.cache_files


def test_the_solver_may_plan_for_several_replicas_here() -> None:
    config = packing(2, 1, packer="solver", solver_seconds=0.2)
    packed = packed_of([3, 4, 5, 6], config)
    assert tokens_of([*read(packed, 0), *read(packed, 1)]) == all_tokens([3, 4, 5, 6])


# ---- order ----


def test_passes_follow_one_another_with_and_without_workers() -> None:
    packed = packed_of()
    collator = packed.data_collator()
    first = [plain(m) for m in read(packed, collator=collator)]
    assert [plain(m) for m in read(packed, collator=collator)] == first
    loader = torch.utils.data.DataLoader(packed, 1, collate_fn=collator, num_workers=2, persistent_workers=True)
    assert [plain(m) for m in loader] == first
    assert [plain(m) for m in loader] == first


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_may_start_anywhere(workers: int) -> None:
    packed = packed_of()
    rest = torch.utils.data.Subset(packed, range(5, len(packed)))
    loader = torch.utils.data.DataLoader(rest, 1, collate_fn=packed.data_collator(), num_workers=workers)
    assert [plain(m) for m in loader] == [plain(m) for m in read(packed)][5:]


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_rows_are_refused(workers: int, monkeypatch) -> None:
    packed = packed_of()
    for seed in range(5):
        order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(seed)).tolist()
        if workers:  # what the first worker gets; played, because torch takes 10 s to end workers that failed
            monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(num_workers=workers))
            order = order[::workers]
        loader = torch.utils.data.DataLoader(packed, 1, sampler=order, collate_fn=packed.data_collator())
        with pytest.raises(ValueError, match=r"came after row .*train_sampling_strategy='sequential'"):
            list(loader)


def test_another_number_of_processes_is_refused() -> None:
    packed = packed_of(LENGTHS, packing(2))
    for step in (1, 4):
        rows = torch.utils.data.Subset(packed, range(0, len(packed), step))
        with pytest.raises(ValueError, match=r"by dp_size=2 processes"):
            list(torch.utils.data.DataLoader(rows, 1, collate_fn=packed.data_collator()))


def test_several_rows_or_missing_columns_are_refused() -> None:
    packed = packed_of()
    collator = packed.data_collator()
    with pytest.raises(ValueError, match="2 rows came at once"):
        collator([packed[0], packed[1]])
    with pytest.raises(ValueError, match=r"lacks document_lengths, row; its columns are .*remove_unused_columns"):
        collator([{"input_ids": [1], "labels": [1]}])
    with pytest.raises(ValueError, match="it was changed after packing"):
        collator([{**packed[0], "document_lengths": [1]}])
    with pytest.raises(ValueError, match=r"packed\.data_collator\(\)"):
        WLBDataCollator()([packed[0]])


@pytest.mark.parametrize("method", ["shuffle", "sort", "train_test_split"])
def test_reordering_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="micro-batches in step order"):
        getattr(packed_of(), method)("row")


# ---- sentences ----


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"no column input_ids; its columns are \['text'\]\. Pass tokenizer"):
        pack_dataset(datasets.Dataset.from_dict({"text": ["a"]}), packing(), WORKLOAD)
    with pytest.raises(ValueError, match=r"takes a datasets\.Dataset, got list"):
        pack_dataset(marked_documents([3]), packing(), WORKLOAD)
    with pytest.raises(ValueError, match="document 1 has no tokens"):
        packed_of([3, 0], shuffle=False)
    with pytest.raises(ValueError, match="was not written by pack_dataset"):
        PackedDataset.from_dataset(table_of([3]))
    packed = packed_of()
    with pytest.raises(ValueError, match=r"has 2 of the \d+ rows"):
        PackedDataset.from_dataset(packed.select([0, 1]))
    packed.info.description = json.dumps({"schema": "hf_wlb.packed/0"})
    with pytest.raises(ValueError, match=r"format 'hf_wlb.packed/0'"):
        PackedDataset.from_dataset(packed)


def test_tokens_are_written_without_python_lists_of_everything() -> None:
    packed = packed_of()
    assert packed.cache_files  # on disk, memory-mapped
    assert packed.features["input_ids"].feature.dtype == "int32"
    assert isinstance(packed.with_format("numpy")[0]["input_ids"], np.ndarray)
