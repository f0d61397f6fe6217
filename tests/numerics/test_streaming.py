"""Packing a stream of unknown lengths: exactly once, resumed at any micro-batch, never reading ahead."""

import json
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.data import StreamingPackedDataset, WLBDataCollator, WLBDataLoader
from hf_wlb.packing import PACKER_NAMES
from hf_wlb.workload import AnalyticWorkload
from tests.support.documents import WORKLOAD, all_tokens, marked_documents, packing, plain, tokens_of

LENGTHS = [3, 20, 1, 21, 7, 16, 2, 9, 40, 5, 5, 12, 1, 19, 8, 4, 6, 17, 3, 11]  # S_max is 20
some_lengths = st.lists(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 19, 20, 21, 45]), max_size=30)
packers = st.sampled_from([name for name in PACKER_NAMES if name != "solver"])


def streaming(source, config=None, **options) -> StreamingPackedDataset:
    return StreamingPackedDataset(source, packing() if config is None else config, WORKLOAD, **options)


def documents_of(lengths):
    return lambda: iter(marked_documents(lengths))


def hub_stream(lengths=LENGTHS, shards: int = 3) -> datasets.IterableDataset:
    return datasets.Dataset.from_list(marked_documents(lengths)).to_iterable_dataset(num_shards=shards)


SOURCES = {
    "function": lambda: documents_of(LENGTHS),
    "list": lambda: marked_documents(LENGTHS),
    "datasets": hub_stream,
    "datasets, shuffled through a buffer": lambda: hub_stream().shuffle(seed=5, buffer_size=6),
    "datasets, mapped in groups": lambda: hub_stream().map(_unchanged, batched=True, batch_size=4),
    "datasets, filtered": lambda: hub_stream().filter(_is_short),
}


def _unchanged(rows):
    return {"input_ids": rows["input_ids"]}


def _is_short(row) -> bool:
    return len(row["input_ids"]) < 40


def record(data: StreamingPackedDataset):
    """Run a pass; return its micro-batches, and the states before the first and after each."""
    states, found = [json.dumps(data.state_dict())], []
    for micro_batch in data:
        found.append(plain(micro_batch))
        states.append(json.dumps(data.state_dict()))
    return found, states


def without_source_state(state: str):
    """Leave out what a source says of itself: it has several ways to name one place."""
    values = json.loads(state)
    del values["stream"]["source_state"]
    return values


# ---- exactly once ----


@settings(max_examples=40, deadline=None)
@given(some_lengths, st.integers(1, 3), st.integers(1, 3), packers)
def test_every_token_once_and_equally_many_micro_batches(lengths, dp_size, size, packer) -> None:
    config = packing(dp_size, size, packer=packer)
    found = [list(streaming(documents_of(lengths), config, dp_rank=rank)) for rank in range(dp_size)]
    assert len({len(replica) for replica in found}) == 1
    assert tokens_of(m for replica in found for m in replica) == all_tokens(lengths)


@pytest.mark.parametrize("packer", [name for name in PACKER_NAMES if name != "solver"])
def test_the_same_plan_as_with_known_lengths(packer: str) -> None:
    config = packing(2, 2, packer=packer)
    known = WLBDataLoader(marked_documents(LENGTHS), config, WORKLOAD, shuffle=False, dp_rank=1)
    found = streaming(documents_of(LENGTHS), config, dp_rank=1)
    assert [plain(m) for m in found] == [plain(m) for m in known]
    mine, theirs = found.report().to_dict(), known.report().to_dict()
    assert {**mine, "plan_ms": 0, "plan_ms_p99": 0} == {**theirs, "plan_ms": 0, "plan_ms_p99": 0}


@pytest.mark.parametrize("length", [1, 20, 21])
def test_one_document_of_an_edge_length(length: int) -> None:
    assert tokens_of(streaming(documents_of([length]))) == all_tokens([length])


def test_no_documents_no_micro_batches() -> None:
    data = streaming([])
    assert record(data) == ([], [json.dumps(streaming([]).state_dict())])


def test_truncated_documents_are_forgotten_too() -> None:
    data = streaming(documents_of([50, 3, 60]), packing(oversize="truncate"))
    found, states = record(data)
    assert sum(sum(1 for t in m["input_ids"][0] if t) for m in found) == 20 + 3 + 20
    assert data.report().truncated == 2
    assert [held["index"] for held in json.loads(states[-1])["stream"]["held"]] in ([], [0], [1], [2])


# ---- resume ----


@pytest.mark.parametrize("source", SOURCES)
def test_resume_at_every_micro_batch(source: str) -> None:
    whole, states = record(streaming(SOURCES[source]()))
    assert len(whole) >= 10
    for stop, state in enumerate(states):
        resumed = streaming(SOURCES[source]())
        resumed.load_state_dict(json.loads(state))
        assert resumed.state_dict() == json.loads(state)
        rest, later = record(resumed)
        assert rest == whole[stop:]
        for mine, theirs in zip(later[1:], states[stop + 1 :], strict=True):
            assert without_source_state(mine) == without_source_state(theirs)
        if len(later) > 2:  # a resumed run can be resumed as well
            again = streaming(SOURCES[source]())
            again.load_state_dict(json.loads(later[-2]))
            assert [plain(m) for m in again] == whole[-1:]


@settings(max_examples=25, deadline=None)
@given(some_lengths, packers, st.integers(1, 2), st.data())
def test_resume_at_any_micro_batch(lengths, packer, dp_size, data) -> None:
    config = packing(dp_size, packer=packer)
    whole, states = record(streaming(documents_of(lengths), config))
    stop = data.draw(st.integers(0, len(whole)))
    resumed = streaming(documents_of(lengths), config)
    resumed.load_state_dict(json.loads(states[stop]))
    assert [plain(m) for m in resumed] == whole[stop:]


def test_labels_survive_a_resume() -> None:
    rows = [{"input_ids": row["input_ids"], "labels": [7] * len(row["input_ids"])} for row in marked_documents(LENGTHS)]
    whole, states = record(streaming(rows))
    assert {t for m in whole for t in m["labels"][0]} == {7, -100}
    resumed = streaming(rows)
    resumed.load_state_dict(json.loads(states[5]))
    assert [plain(m) for m in resumed] == whole[5:]


def test_the_source_is_continued_by_its_own_state() -> None:
    """Of a source that has a state, a resume reads the first document (to recognise it) and then none twice."""
    read = []

    def note(row, index):
        read.append(index)
        return row

    def source():
        return hub_stream(shards=4).map(note, with_indices=True)

    _, states = record(streaming(source()))
    held = json.loads(states[9])["stream"]
    read.clear()
    resumed = streaming(source())
    resumed.load_state_dict(json.loads(states[9]))
    list(resumed)
    assert read == [0, *range(held["read"], len(LENGTHS))]


def test_a_second_epoch_after_a_resume_is_a_whole_one() -> None:
    data = streaming(hub_stream())
    whole, states = record(data)
    resumed = streaming(hub_stream())
    resumed.load_state_dict(json.loads(states[4]))
    list(resumed)
    assert resumed.epoch == 1
    assert [plain(m) for m in resumed] == whole


@pytest.mark.parametrize("read_before", [0, 1])
def test_a_stream_that_was_left_in_the_middle_begins_anew_in_every_epoch(read_before: int) -> None:
    """`datasets` tells that middle as its state, and starts there in the pass of that number."""
    fresh, left = streaming(hub_stream()), hub_stream()
    earlier = streaming(left)
    for _ in range(read_before):
        list(earlier)
    next(iter(earlier))
    data = streaming(left)
    for _ in range(3):
        assert [plain(m) for m in data] == [plain(m) for m in fresh]


def test_epochs_reach_a_source_that_reshuffles() -> None:
    def source():
        return hub_stream(shards=5).shuffle(seed=1, buffer_size=4)

    data = streaming(source())
    first, second = [plain(m) for m in data], [plain(m) for m in data]
    assert first != second
    again = streaming(source())
    again.set_epoch(1)
    found, states = record(again)
    assert found == second
    resumed = streaming(source())
    resumed.load_state_dict(json.loads(states[3]))
    assert resumed.epoch == 1 and [plain(m) for m in resumed] == second[3:]


def test_through_a_torch_data_loader() -> None:
    whole, states = record(streaming(documents_of(LENGTHS)))
    data = streaming(documents_of(LENGTHS))
    found = []
    for place, micro_batch in enumerate(torch.utils.data.DataLoader(data, batch_size=None)):
        found.append(plain(micro_batch))
        assert data.state_dict() == json.loads(states[place + 1])
    assert found == whole
    data.load_state_dict(json.loads(states[5]))
    assert [plain(m) for m in torch.utils.data.DataLoader(data, batch_size=None)] == whole[5:]
    # as a Trainer on one process reads it
    data.load_state_dict(json.loads(states[5]))
    loader = torch.utils.data.DataLoader(data, batch_size=1, collate_fn=WLBDataCollator())
    assert [plain(m) for m in loader] == whole[5:]


def test_one_worker_packs_and_keeps_its_state_to_itself() -> None:
    whole, states = record(streaming(documents_of(LENGTHS)))
    data = streaming(documents_of(LENGTHS))
    data.load_state_dict(json.loads(states[3]))
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
    found = []
    for micro_batch in loader:
        found.append(plain(micro_batch))
        with pytest.raises(RuntimeError, match=r"read in a data loader worker.*num_workers=0"):
            data.state_dict()
    assert found == whole[3:]


def test_several_workers_are_refused(monkeypatch) -> None:
    # Played, because torch takes 10 s to end workers that failed
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(ValueError, match=r"num_workers=2 would read this stream 2 times"):
        list(streaming(documents_of(LENGTHS)))


# ---- what it reads and keeps ----


@pytest.mark.parametrize("packer", ["steady", "wlb", "next-fit", "concat-and-cut"])
def test_at_most_one_document_is_looked_ahead(packer: str) -> None:
    read = 0

    def source():
        nonlocal read
        for row in marked_documents(LENGTHS * 5):
            read += 1
            yield row

    data = streaming(source, packing(packer=packer))
    planned: set[int] = set()
    for _ in data:
        step = data._progress.step
        assert step is not None
        planned |= {document.index for document in step.plan.documents}
        needed = planned | {document.index for document in step.waiting}
        assert read <= len(needed) + 1
    assert read == len(LENGTHS) * 5


def test_tokens_are_held_only_while_they_wait() -> None:
    data = streaming(documents_of(LENGTHS * 5))
    for _ in data:
        state = data.state_dict()
        waiting = {int(d[0]) for name in ("pool", "remained") for d in state["planner"]["packer"][name]}
        waiting |= {piece[0] for piece in state["planner"]["reader"]["pending"]}
        assert {held["index"] for held in state["stream"]["held"]} == waiting


# ---- sentences ----


def test_bad_sources_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"is a list_iterator, which can be read only once.*Pass the function"):
        streaming(documents_of([1])())
    with pytest.raises(TypeError, match="The source is a int"):
        streaming(3)
    with pytest.raises(ValueError, match=r"Document 1 of the stream has no input_ids; its columns are \['text'\]"):
        list(streaming([{"input_ids": [1]}, {"text": "a"}]))
    with pytest.raises(ValueError, match="Document 0 of the stream is padded"):
        list(streaming([{"input_ids": [1, 0], "attention_mask": [1, 0]}]))
    with pytest.raises(ValueError, match="document 1 has no tokens"):
        list(streaming(marked_documents([2, 0])))
    with pytest.raises(ValueError, match="Document 1 of the stream is a NoneType"):
        list(streaming([{"input_ids": [1]}, None, {"input_ids": [1]}]))
    with pytest.raises(ValueError, match="solver packer stops"):
        streaming([], packing(2, packer="solver"))
    with pytest.raises(ValueError, match="dp_rank=1 is no replica"):
        streaming([], dp_rank=1)


@pytest.mark.parametrize("source", ["function", "datasets"])
def test_a_state_of_another_stream_is_refused(source: str) -> None:
    make = {"function": documents_of, "datasets": hub_stream}[source]
    _, states = record(streaming(make(LENGTHS)))
    for other in ([4, *LENGTHS[1:]], [5, 5, 5]):
        resumed = streaming(make(other))
        resumed.load_state_dict(json.loads(states[8]))
        with pytest.raises(ValueError, match="belongs to another stream"):
            list(resumed)


def test_a_state_of_something_else_is_refused() -> None:
    state = streaming(documents_of(LENGTHS)).state_dict()
    with pytest.raises(ValueError, match="other packing settings"):
        streaming(documents_of(LENGTHS), packing(context=18)).load_state_dict(state)
    with pytest.raises(ValueError, match="another workload model"):
        StreamingPackedDataset([], packing(), AnalyticWorkload.from_crossover(9)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"schema 'hf_wlb.loader/1', but this version"):
        streaming([]).load_state_dict({**state, "schema": "hf_wlb.loader/1"})


def test_a_pass_broken_off_starts_anew_and_the_old_iterator_ends() -> None:
    data = streaming(documents_of(LENGTHS))
    old = iter(data)
    first = plain(next(old))
    assert plain(next(iter(data))) == first
    with pytest.raises(RuntimeError, match="This iterator was replaced"):
        next(old)


def test_control_without_the_waiting_tokens_a_resume_fails() -> None:
    _, states = record(streaming(documents_of(LENGTHS)))
    place = next(i for i, s in enumerate(states) if json.loads(s)["stream"]["held"])
    state = json.loads(states[place])
    state["stream"]["held"] = []
    resumed = streaming(documents_of(LENGTHS))
    resumed.load_state_dict(state)
    with pytest.raises(KeyError):
        list(resumed)
