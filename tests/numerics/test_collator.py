"""The collator alone: what a micro-batch holds, what is refused, and that documents cannot see one another."""

import json

import numpy as np
import pytest
import torch

import hf_wlb
from hf_wlb.data import WLBDataCollator
from hf_wlb.data.tokenization import train_byte_level_bpe
from tests.support.tiny_llama import tiny_llama

KEYS = {
    "input_ids",
    "labels",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "use_cache",
}


def test_documents_are_laid_out_one_after_the_other() -> None:
    out = WLBDataCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}])
    assert set(out) == KEYS
    assert out["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert out["labels"].tolist() == [[-100, 6, 7, -100, -100, 10]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert out["cu_seq_lens_q"].tolist() == out["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert (out["max_length_q"], out["max_length_k"], out["use_cache"]) == (3, 3, False)
    assert {out[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    assert out["cu_seq_lens_q"].dtype == out["cu_seq_lens_k"].dtype == torch.int32
    assert type(out["max_length_q"]) is int


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda v: np.array(v, dtype=np.int32)])
def test_lists_arrays_and_tensors_give_the_same(kind) -> None:
    given = [3, 4, 5]
    labels = [-100, 4, -100]
    out = WLBDataCollator()([{"input_ids": kind(given), "labels": kind(labels), "text": "unused"}])
    assert out["input_ids"].tolist() == [given] and out["labels"].tolist() == [[-100, 4, -100]]


def test_what_is_given_is_not_written_to() -> None:
    ids, labels = np.array([1, 2]), np.array([7, 8])
    WLBDataCollator()([{"input_ids": ids, "labels": labels}])
    assert ids.tolist() == [1, 2] and labels.tolist() == [7, 8]


def test_no_documents_make_a_dummy_without_targets() -> None:
    out = WLBDataCollator(pad_token_id=9)([])
    assert set(out) == KEYS
    assert out["input_ids"].tolist() == [[9, 9]] and out["labels"].tolist() == [[-100, -100]]
    assert out["cu_seq_lens_q"].tolist() == [0, 2]


def test_an_all_ones_mask_is_dropped_and_a_padded_one_refused() -> None:
    out = WLBDataCollator()([{"input_ids": [1, 2], "attention_mask": [1, 1]}] * 2)
    assert "attention_mask" not in out
    with pytest.raises(ValueError, match=r"Document 1 of the micro-batch is padded: .*padding=False"):
        WLBDataCollator()([{"input_ids": [1]}, {"input_ids": [1, 0], "attention_mask": [1, 0]}])


def test_valid_label_counts_are_lengths_minus_one() -> None:
    lengths = [1, 7, 2, 137]
    out = WLBDataCollator()([{"input_ids": [3] * n} for n in lengths])
    assert int((out["labels"] != -100).sum()) == sum(n - 1 for n in lengths)
    # Transformers drops the first column before it counts: nothing valid may be lost by that
    assert int((out["labels"][:, 1:] != -100).sum()) == sum(n - 1 for n in lengths)


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        ([{"input_ids": [1]}, {"input_ids": []}], r"Document 1 .* has no tokens\. Remove empty documents"),
        ([{"text": "a", "b": 1}], r"Document 0 .* has no input_ids; its columns are \['b', 'text'\]"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"has 2 input_ids but 1 labels"),
        ([{"input_ids": [1] * 9}], r"has 9 tokens, more than the 8 positions .*max_document_tokens=8"),
        ([{"input_ids": [[1, 2]]}], r"are of shape \[1, 2\] .* flat list of integers"),
        ([{"input_ids": [0.5]}], r"dtype float64; a document is a flat list"),
        ([[1, 2]], r"is a list; a document is a mapping with input_ids"),
        ([{"input_ids": [1, 2], "document_lengths": [1, 1], "row": 0}], r"packed\.data_collator\(\)"),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 1]}], r"holds 2 documents that were packed before"),
    ],
)
def test_bad_documents_get_a_sentence(features, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WLBDataCollator(max_position_embeddings=8)(features)


def test_a_document_of_exactly_max_position_embeddings_is_taken() -> None:
    assert WLBDataCollator(max_position_embeddings=8)([{"input_ids": [1] * 8}])["max_length_q"] == 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (train_byte_level_bpe(["a"], 258),),
            r"takes pad_token_id, .*, got \w+\. It needs no tokenizer..*WLBDataCollator\(pad_token_id=",
        ),
        ((None,), r"takes pad_token_id, the number of a token, got NoneType\. Leave it out"),
        ((True,), r"takes pad_token_id, .*, got bool"),
        ((0, "512"), r"takes max_position_embeddings, a number of tokens or None, got str"),
    ],
)
def test_what_is_no_number_is_said(arguments, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        WLBDataCollator(*arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    assert WLBDataCollator(np.int64(3)).pad_token_id == 3


@pytest.mark.parametrize("arguments", [{"pad_token_id": -1}, {"max_position_embeddings": 0}])
def test_bad_settings_get_a_sentence(arguments) -> None:
    with pytest.raises(ValueError, match="must be"):
        WLBDataCollator(**arguments)


def test_a_collated_micro_batch_passes_and_two_are_refused() -> None:
    collator = WLBDataCollator()
    once = collator([{"input_ids": [1, 2]}])
    assert collator([once])["input_ids"] is once["input_ids"]
    with pytest.raises(ValueError, match="2 micro-batches that are packed already"):
        collator([once, once])


def test_the_package_exports_it_without_loading_everything() -> None:
    assert hf_wlb.WLBDataCollator is WLBDataCollator
    import hf_wlb.data as data

    assert "pack_dataset" in dir(data) and not hasattr(data, "no_such_name")
    assert json.dumps(sorted(data._EXPORTS))  # plain strings


# ---- documents cannot see one another (FIELD 1, 7) ----


def _logits(model, micro_batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**micro_batch).logits[0]


def _two_versions(drop: tuple[str, ...] = (), **changed):
    """Logits of document 2 with two versions of document 1."""
    model = tiny_llama()
    first, second = list(range(10, 22)), list(range(30, 38))
    other = [*first[:5], 99, *first[6:]]
    results = []
    for document in (first, other):
        micro_batch = WLBDataCollator()([{"input_ids": document}, {"input_ids": second}])
        micro_batch = {name: value for name, value in micro_batch.items() if name not in drop} | changed
        results.append(_logits(model, micro_batch)[len(first) :])
    return results


def test_changing_document_one_leaves_document_two_bit_identical() -> None:
    before, after = _two_versions()
    assert torch.equal(before, after)


def test_document_two_is_what_it_is_alone() -> None:
    before, _ = _two_versions()
    alone = _logits(tiny_llama(), WLBDataCollator()([{"input_ids": list(range(30, 38))}]))
    torch.testing.assert_close(before, alone, rtol=0, atol=1e-5)


def test_control_without_boundaries_document_two_changes() -> None:
    before, after = _two_versions(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids"))
    assert not torch.equal(before, after)


def test_control_a_mask_of_ones_would_switch_isolation_off() -> None:
    before, after = _two_versions(attention_mask=torch.ones(1, 20, dtype=torch.int64))
    assert not torch.equal(before, after)


def test_control_a_cache_would_switch_isolation_off() -> None:
    before, after = _two_versions(use_cache=True)
    assert not torch.equal(before, after)
