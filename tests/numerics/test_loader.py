"""The loader over known lengths: exactly once, on all replicas, and resumed at any micro-batch."""

import json
import logging

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.data import DocumentDataset, DocumentKey, PlannedBatchSampler, WLBDataLoader, document_lengths
from hf_wlb.packing import PACKER_NAMES
from hf_wlb.workload import AnalyticWorkload
from tests.support.documents import WORKLOAD, all_tokens, marked_documents, packing, plain, tokens_of

LENGTHS = [3, 20, 1, 21, 7, 16, 2, 9, 40, 5, 5, 12, 1, 19, 8, 4, 6, 17, 3, 11]  # S_max is 20
some_lengths = st.lists(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 19, 20, 21, 45]), max_size=30)
packers = st.sampled_from([name for name in PACKER_NAMES if name != "solver"])


def loader_of(lengths, config=None, **options) -> WLBDataLoader:
    config = packing() if config is None else config
    return WLBDataLoader(marked_documents(lengths), config, WORKLOAD, **options)


# ---- exactly once ----


@settings(max_examples=60, deadline=None)
@given(some_lengths, st.integers(1, 3), st.integers(1, 3), packers, st.integers(0, 3))
def test_every_token_once_per_epoch_and_equally_many_micro_batches(lengths, dp_size, size, packer, seed) -> None:
    config = packing(dp_size, size, packer=packer)
    for epoch in range(2):
        found = []
        for dp_rank in range(dp_size):
            loader = loader_of(lengths, config, dp_rank=dp_rank, seed=seed)
            loader.set_epoch(epoch)
            found.append(list(loader))
            assert loader.epoch == epoch + 1
            loader.set_epoch(epoch)
            assert len(found[-1]) == len(loader) == loader.steps_per_epoch * size
        assert tokens_of(m for replica in found for m in replica) == all_tokens(lengths)


@settings(max_examples=25, deadline=None)
@given(some_lengths, packers, st.data())
def test_resume_at_any_micro_batch_gives_the_same_stream(lengths, packer, data) -> None:
    config = packing(packer=packer)
    loader = loader_of(lengths, config)
    states, whole = [json.dumps(loader.state_dict())], []
    for micro_batch in loader:
        whole.append(plain(micro_batch))
        states.append(json.dumps(loader.state_dict()))
    stop = data.draw(st.integers(0, len(whole)))
    resumed = loader_of(lengths, config)
    resumed.load_state_dict(json.loads(states[stop]))
    assert resumed.state_dict() == json.loads(states[stop])
    assert [plain(m) for m in resumed] == whole[stop:]
    assert resumed.epoch == 1
    # and the epochs after it are those of a loader that was never stopped
    assert [plain(m) for m in resumed] == [plain(m) for m in loader]


@pytest.mark.parametrize("packer", [name for name in PACKER_NAMES if name != "solver"])
def test_resume_at_every_micro_batch(packer: str) -> None:
    config = packing(2, 2, packer=packer)
    loader = loader_of(LENGTHS, config, dp_rank=1)
    states, whole, plans = [loader.state_dict()], [], []
    for micro_batch in loader:
        whole.append(plain(micro_batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
        plans.append(loader.plan)
    for stop, state in enumerate(states):
        resumed = loader_of(LENGTHS, config, dp_rank=1)
        resumed.load_state_dict(state)
        rest = []
        for place, micro_batch in enumerate(resumed):
            rest.append(plain(micro_batch))
            assert resumed.plan == plans[stop + place]
            assert resumed.state_dict() == states[stop + place + 1]
        assert rest == whole[stop:]


@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (2, 4)])
def test_workers_and_prefetch_change_nothing(workers: int, prefetch: int | None) -> None:
    options = {"num_workers": workers, "prefetch_factor": prefetch}
    plain_loader = loader_of(LENGTHS, seed=3)
    states, whole = [], []
    for micro_batch in plain_loader:
        whole.append(plain(micro_batch))
        states.append(plain_loader.state_dict())
    loader = loader_of(LENGTHS, seed=3, **options)
    seen = []
    for place, micro_batch in enumerate(loader):
        seen.append(plain(micro_batch))
        assert loader.state_dict() == states[place]  # handed out, not fetched ahead
    assert seen == whole
    for stop in (0, 2, len(whole) - 1):
        resumed = loader_of(LENGTHS, seed=3, **options)
        resumed.load_state_dict(states[stop])
        assert [plain(m) for m in resumed] == whole[stop + 1 :]


def test_the_state_is_the_same_on_every_replica() -> None:
    config = packing(2, 2)
    states = []
    for dp_rank in range(2):
        loader = loader_of(LENGTHS, config, dp_rank=dp_rank)
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        next(iterator)
        states.append(loader.state_dict())
    assert states[0] == states[1] and states[0]["handed_out"] == 1


def test_no_documents_no_micro_batches() -> None:
    loader = loader_of([])
    assert len(loader) == 0 and list(loader) == []
    resumed = loader_of([])
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(resumed) == []


@pytest.mark.parametrize("length", [1, 20, 21])
def test_one_document_of_an_edge_length(length: int) -> None:
    found = list(loader_of([length]))
    assert len(found) == 2  # one step, padded with a dummy where one piece is all there is
    assert tokens_of(found) == all_tokens([length])
    sizes = sorted(int(m["max_length_q"]) for m in found if int((m["input_ids"] > 0).sum()))
    assert sizes == ([1, 20] if length == 21 else [length])  # S_max stays whole, one more is split


# ---- epochs ----


def test_epochs_differ_with_shuffle_and_agree_without() -> None:
    shuffled, stored = loader_of(LENGTHS), loader_of(LENGTHS, shuffle=False)
    assert [plain(m) for m in shuffled] != [plain(m) for m in shuffled]
    assert [plain(m) for m in stored] == [plain(m) for m in stored]


def test_a_pass_broken_off_starts_anew_and_the_old_iterator_ends() -> None:
    loader = loader_of(LENGTHS)
    old = iter(loader)
    first = plain(next(old))
    next(old)
    assert plain(next(iter(loader))) == first
    with pytest.raises(RuntimeError, match="This iterator was replaced"):
        next(old)


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only(caplog) -> None:
    loader = loader_of(LENGTHS)
    loader.set_epoch(2)
    iterator = iter(loader)
    next(iterator)
    second = plain(next(iterator))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = loader_of(LENGTHS)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert plain(next(iter(resumed))) == second
    resumed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        resumed.set_epoch(3)
    assert "starts at its beginning" in caplog.text
    assert tokens_of(resumed) == all_tokens(LENGTHS)


def test_iterating_leaves_the_global_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    list(loader_of(LENGTHS))
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- what is being trained ----


def test_plan_metrics_and_report_follow_what_is_handed_out() -> None:
    loader = loader_of(LENGTHS, packing(2, 2), num_workers=1, prefetch_factor=4)
    assert loader.plan is None and loader.report().steps + loader.report().flush_steps == 0
    for place, _ in enumerate(loader):
        assert loader.plan is not None and loader.plan.step == place // 2
        assert loader.step_metrics["tokens"] == loader.plan.tokens
        report = loader.report()
        assert report.steps + report.flush_steps == place // 2 + 1
    report = loader.report()
    assert (report.documents, report.dropped) == (len(LENGTHS), 0)
    assert report.split == 2 and report.source_tokens == sum(LENGTHS)


def test_accelerate_hands_the_loader_back_as_it_is() -> None:
    from accelerate import Accelerator

    loader = loader_of(LENGTHS)
    assert not isinstance(loader, torch.utils.data.DataLoader)
    assert Accelerator(cpu=True).prepare(loader) is loader


def test_tensors_go_to_the_device() -> None:
    out = next(iter(loader_of(LENGTHS, device="meta")))
    assert out["input_ids"].device.type == "meta" and out["use_cache"] is False


# ---- lengths ----


def test_lengths_come_from_the_column_or_the_tokens(caplog) -> None:
    rows = marked_documents(LENGTHS)
    table = datasets.Dataset.from_list(rows)
    with caplog.at_level(logging.INFO, logger="hf_wlb"):
        assert document_lengths(rows).tolist() == document_lengths(table).tolist() == LENGTHS
        assert caplog.text.count("would spare this pass") == 2
        caplog.clear()
        with_column = table.add_column("length", LENGTHS)
        assert document_lengths(with_column).tolist() == LENGTHS
        assert document_lengths([{**r, "length": n} for r, n in zip(rows, LENGTHS, strict=True)]).tolist() == LENGTHS
        assert caplog.text == ""
    assert document_lengths(table.select([3, 1])).tolist() == [21, 20]  # an indices mapping
    assert document_lengths(table.select([])).tolist() == []


def test_a_datasets_table_gives_what_a_list_gives() -> None:
    table = datasets.Dataset.from_list([{**row, "text": "x"} for row in marked_documents(LENGTHS)])
    from_table = WLBDataLoader(table, packing(), WORKLOAD)
    assert [plain(m) for m in from_table] == [plain(m) for m in loader_of(LENGTHS)]


def test_a_transform_of_a_table_is_respected() -> None:
    texts = datasets.Dataset.from_dict({"text": ["a" * n for n in LENGTHS]})
    rows = texts.with_transform(lambda batch: {"input_ids": [list(text.encode()) for text in batch["text"]]})
    assert document_lengths(rows).tolist() == LENGTHS
    found = tokens_of(WLBDataLoader(rows, packing(), WORKLOAD))
    assert found == {ord("a"): sum(LENGTHS)}


def test_labels_travel_with_their_piece() -> None:
    dataset = DocumentDataset([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}], np.array([4]))
    piece = dataset[DocumentKey(0, 1, 2)]
    assert piece["input_ids"].tolist() == [2, 3] and piece["labels"].tolist() == [-100, 3]
    assert dataset.__getitems__([]) == [] and len(dataset) == 1


def test_the_sampler_alone_drives_a_torch_data_loader() -> None:
    from hf_wlb.data import WLBDataCollator

    rows = marked_documents(LENGTHS)
    sampler = PlannedBatchSampler(LENGTHS, packing(), WORKLOAD)
    sampler.set_epoch(1)
    loader = torch.utils.data.DataLoader(DocumentDataset(rows), batch_sampler=sampler, collate_fn=WLBDataCollator())
    ours = loader_of(LENGTHS)
    ours.set_epoch(1)
    assert [plain(m) for m in loader] == [plain(m) for m in ours]
    assert len(sampler) == len(loader) == sampler.steps(1) * 2


# ---- sentences ----


def test_bad_settings_get_a_sentence() -> None:
    rows = marked_documents([3, 4])
    with pytest.raises(ValueError, match=r"3 lengths were given for 2 documents"):
        WLBDataLoader(rows, packing(), WORKLOAD, lengths=[1, 2, 3])
    with pytest.raises(ValueError, match=r"dp_rank=2 is no replica of dp_size=2; give a number from 0 to 1"):
        WLBDataLoader(rows, packing(2), WORKLOAD, dp_rank=2)
    with pytest.raises(ValueError, match=r"solver packer stops after solver_seconds.*pack_dataset"):
        WLBDataLoader(rows, packing(2, packer="solver"), WORKLOAD)
    with pytest.raises(ValueError, match=r"Row 0 of the data set has no input_ids; its columns are \['text'\]"):
        WLBDataLoader([{"text": "a"}], packing(), WORKLOAD)
    with pytest.raises(ValueError, match=r"no column input_ids; its columns are \['text'\]"):
        WLBDataLoader(datasets.Dataset.from_dict({"text": ["a"]}), packing(), WORKLOAD)
    with pytest.raises(ValueError, match="is a list; a document is a mapping"):
        WLBDataLoader([[1, 2]], packing(), WORKLOAD)
    with pytest.raises(ValueError, match=r"Document 1 has 4 tokens, but the plan was made for 5\."):
        list(WLBDataLoader(rows, packing(), WORKLOAD, lengths=[3, 5]))
    with pytest.raises(ValueError, match="has 4 tokens, but the plan was made for at least 5"):
        DocumentDataset(rows)[DocumentKey(1, 2, 3)]
    with pytest.raises(ValueError, match=r"document 1 has no tokens"):
        list(WLBDataLoader(marked_documents([3, 0]), packing(), WORKLOAD, shuffle=False))


def test_empty_documents_can_be_skipped_and_are_counted() -> None:
    loader = loader_of([3, 0, 4, 0], packing(empty="skip"))
    assert tokens_of(loader) == all_tokens([3, 0, 4, 0])
    assert loader.report().empty == 2


def test_a_state_of_something_else_is_refused() -> None:
    state = loader_of(LENGTHS).state_dict()
    others = {
        "another data set": loader_of([*LENGTHS[:-1], 10]),
        "in another order": loader_of(LENGTHS, seed=1),
        "other packing settings": loader_of(LENGTHS, packing(context=18)),
        "another workload model": WLBDataLoader(
            marked_documents(LENGTHS), packing(), AnalyticWorkload.from_crossover(9)
        ),
    }
    for sentence, loader in others.items():
        loader.set_epoch(4)
        with pytest.raises(ValueError, match=sentence):
            loader.load_state_dict(state)
        assert loader.epoch == 4  # unharmed
    changed = marked_documents(LENGTHS)
    changed[0]["input_ids"][0] += 1
    with pytest.raises(ValueError, match="as long as these, but their tokens differ"):
        WLBDataLoader(changed, packing(), WORKLOAD).load_state_dict(state)
    for name in ("epoch", "handed_out", "planner", "content"):
        with pytest.raises(ValueError, match=f"incomplete: {name} is missing"):
            loader_of(LENGTHS).load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match="7 micro-batches of a step were handed out, but a step has 2"):
        loader_of(LENGTHS).load_state_dict({**state, "handed_out": 7})
    with pytest.raises(ValueError, match="is a NoneType"):
        loader_of(LENGTHS).load_state_dict(None)
    with pytest.raises(ValueError, match=r"schema 'hf_wlb.loader/0', but this version"):
        loader_of(LENGTHS).load_state_dict({**state, "schema": "hf_wlb.loader/0"})
    state["planner"]["schema"] = "hf_wlb.planner/99"
    with pytest.raises(ValueError, match=r"schema 'hf_wlb.planner/99'"):
        loader_of(LENGTHS).load_state_dict(state)


def test_control_a_state_taken_later_gives_another_stream() -> None:
    loader = loader_of(LENGTHS)
    whole = [plain(m) for m in loader]
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = loader_of(LENGTHS)
    resumed.load_state_dict(loader.state_dict())
    assert [plain(m) for m in resumed] != whole[1:]
