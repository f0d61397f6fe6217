"""Readers, sources and settings: order, unusual documents, and what is refused in which words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_wlb.lengths import RandomOrder
from hf_wlb.packing import PACKER_NAMES, ArraySource, DocumentReader, PackingConfig, StepPlanner
from tests.unit.packing.checks import WORKLOAD, make_planner


def reader_of(lengths, longest=10, **options):
    return DocumentReader(ArraySource(np.array(lengths, dtype=np.int64)), WORKLOAD, longest, **options)


def read_all(reader):
    documents = []
    while (document := reader.read(7)) is not None:
        documents.append(tuple(document)[:3])
    return documents


def test_whole_documents_come_in_order():
    reader = reader_of([3, 10, 1])
    assert reader.peek() == 3 and not reader.exhausted
    document = reader.read(7)
    assert document == (0, 0, 3, WORKLOAD.document(3), 7)
    assert read_all(reader) == [(1, 0, 10), (2, 0, 1)]
    assert reader.exhausted and reader.peek() is None and reader.read(8) is None


def test_a_random_order_is_followed():
    lengths = np.arange(1, 21)
    order = RandomOrder(20, seed=1, epoch=2)
    reader = DocumentReader(ArraySource(lengths, order), WORKLOAD, None)
    expected = [(int(i), 0, int(lengths[i])) for i in order.block(0, 20)]
    assert read_all(reader) == expected != sorted(expected)


def test_split_by_hand():
    reader = reader_of([11, 10, 25, 20])
    assert read_all(reader) == [(0, 0, 10), (0, 10, 1), (1, 0, 10), (2, 0, 10), (2, 10, 10), (2, 20, 5),
                                (3, 0, 10), (3, 10, 10)]  # fmt: skip
    assert (reader.counts.split, reader.counts.pieces, reader.counts.documents) == (3, 7, 4)
    assert reader.counts.source_tokens == 66 and reader.counts.truncated == 0


def test_truncate_by_hand():
    reader = reader_of([11, 10, 25], oversize="truncate")
    assert read_all(reader) == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]
    assert (reader.counts.truncated, reader.counts.truncated_tokens, reader.counts.split) == (2, 16, 0)


def test_too_long_is_an_error_where_wanted():
    with pytest.raises(ValueError, match=r"document 1 has 11 tokens, more than max_document_tokens=10\. Choose"):
        read_all(reader_of([10, 11], oversize="error"))


def test_a_document_longer_than_any_model_prices_is_split():
    reader = reader_of([2**33], longest=2**31 - 1)
    assert [length for _, _, length in read_all(reader)] == [2**31 - 1] * 4 + [4]


def test_empty_documents():
    with pytest.raises(ValueError, match=r"document 1 has no tokens\. Remove .*or choose empty='skip'"):
        read_all(reader_of([3, 0]))
    reader = reader_of([0, 3, 0, 0, 2, 0], empty="skip")
    assert read_all(reader) == [(1, 0, 3), (4, 0, 2)]
    assert (reader.counts.empty, reader.counts.documents, reader.counts.source_tokens) == (4, 6, 5)


@pytest.mark.parametrize("empty", ["error", "skip"])
def test_a_negative_length_names_its_document(empty):
    reader = reader_of([3, 4, -2], empty=empty)
    with pytest.raises(ValueError, match=r"document 2 has a negative length \(-2\); lengths are .*Check how"):
        read_all(reader)


@given(st.lists(st.integers(0, 35), max_size=30), st.integers(0, 80))
def test_a_state_continues_in_the_middle_of_a_split(lengths, taken):
    reader = reader_of(lengths, empty="skip")
    for _ in range(taken):
        reader.read(0)
    text = json.dumps(reader.state_dict())
    other = reader_of(lengths, empty="skip")
    other.load_state_dict(json.loads(text))
    assert json.dumps(other.state_dict()) == text
    assert read_all(other) == read_all(reader)
    assert other.counts == reader.counts


def test_lengths_beyond_one_block_are_read_once():
    lengths = np.random.default_rng(0).integers(1, 9, 3 * ArraySource.block_size + 5)
    assert [n for _, _, n in read_all(reader_of(lengths))] == lengths.tolist()


def test_a_memory_map_is_read_as_it_is(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5, 3, 8], dtype=np.uint16))
    source = ArraySource(np.load(tmp_path / "lengths.npy", mmap_mode="r"))
    assert source.block(0, 9)[1].tolist() == [5, 3, 8] and len(source) == 3
    assert isinstance(source._lengths, np.memmap)


@pytest.mark.parametrize(
    ("lengths", "order", "message"),
    [
        (np.ones((2, 2), dtype=int), None, r"one-dimensional array of integers, got shape \(2, 2\)"),
        (np.array([1.5]), None, "of integers, got shape .* of float64"),
        (np.array([1, 2]), RandomOrder(3, 0, 0), "order covers 3 documents but there are 2 lengths"),
    ],
)
def test_arrays_that_are_no_lengths(lengths, order, message):
    with pytest.raises(ValueError, match=message):
        ArraySource(lengths, order)


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 0}, "context_length must be a whole number of at least 1, got 0"),
        ({"micro_batches_per_replica": 0}, "micro_batches_per_replica must be a whole number of at least 1, got 0"),
        ({"dp_size": -1}, "dp_size must be a whole number of at least 1, got -1"),
        ({"pp_size": 0}, "pp_size must be a whole number of at least 1, got 0"),
        ({"window_steps": 0}, "window_steps must be a whole number of at least 1, got 0"),
        ({"packer": "best-fit"}, "unknown packer 'best-fit'; choose one of steady, wlb, greedy, solver, next-fit, con"),
        ({"oversize": "drop"}, "oversize must be one of split, truncate, error, got 'drop'"),
        ({"empty": "keep"}, "empty must be one of error, skip, got 'keep'"),
        ({"max_tokens_per_micro_batch": 99}, "=99 is below context_length=100.*Raise the former or lower the latter"),
        ({"max_document_tokens": 126}, "max_document_tokens=126 must lie between 1 and the 125 tokens that the steady"),
        (
            {"max_document_tokens": 126},
            "max_tokens_per_micro_batch .S_max, by default 1.25 x context_length.. Raise that",
        ),
        (
            {"max_document_tokens": 101, "packer": "greedy"},
            "the 100 tokens that the greedy packer .*: context_length. Raise",
        ),
        ({"max_document_tokens": 0}, "max_document_tokens=0 must lie between 1"),
        ({"thresholds": (50, 30)}, r"must ascend strictly, got \[50, 30\]; sort them"),
        ({"thresholds": (30, 30)}, r"must ascend strictly, got \[30, 30\]; .*remove repetitions"),
        ({"thresholds": ()}, "at least one level"),
        ({"thresholds": (0, 30)}, "at least 1 token, got 0"),
        ({"max_time_gap": -0.1}, "max_time_gap must not be negative, got -0.1"),
        ({"context_length": "32"}, "context_length must be a whole number of at least 1, got '32'"),
        ({"max_document_tokens": 32.5}, "max_document_tokens must be a whole number or None, got 32.5"),
        ({"max_wait_steps": 0}, "max_wait_steps must be at least 1, got 0"),
        ({"max_waiting_contexts": 0}, "max_waiting_contexts must be positive or None, got 0"),
        ({"outlier_tokens": 0}, "outlier_tokens must be at least 1 or None, got 0"),
        ({"solver_seconds": 0}, "solver_seconds must be positive, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        PackingConfig(**{"context_length": 100, "micro_batches_per_replica": 2, **settings})


def test_settings_go_through_json():
    config = PackingConfig(100, 2, thresholds=[30, 50], packer="wlb", max_document_tokens=110)  # type: ignore[arg-type]
    again = PackingConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and again.thresholds == (30, 50)
    with pytest.raises(ValueError, match="unknown packing settings: spread"):
        PackingConfig.from_dict({**config.to_dict(), "spread": 2})


@pytest.mark.parametrize("packer", PACKER_NAMES)
def test_a_bad_document_does_not_pass_through_any_packer(packer):
    config = PackingConfig(10, 2, packer=packer)
    with pytest.raises(ValueError, match="document 4 has no tokens"):
        list(make_planner([3, 4, 5, 9, 0, 3], config))
    if packer != "concat-and-cut":  # which cuts everywhere
        long = PackingConfig(10, 2, packer=packer, oversize="error")
        with pytest.raises(ValueError, match="document 2 has 13 tokens"):
            list(make_planner([3, 4, 13], long))


def test_a_stream_is_read_one_document_at_a_time():
    """A source that tokenises as it is read must not be asked to run ahead."""

    class Stream:
        block_size = 1
        fingerprint = "stream"
        asked = 0

        def block(self, start, stop):
            assert stop == start + 1
            self.asked = max(self.asked, stop)
            size = 0 if start >= 50 else 1
            return np.full(size, start), np.full(size, 3)

    stream = Stream()
    planner = StepPlanner(stream, WORKLOAD, PackingConfig(12, 2))
    assert next(planner).tokens == 24
    assert stream.asked == 9  # 8 were planned, one is looked at ahead
