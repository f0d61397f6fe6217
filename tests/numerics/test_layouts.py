"""A plan that goes on under another layout: every document once, none twice."""

from typing import Any

import pytest

from hf_wlb import PackingConfig, WLBDataLoader
from hf_wlb.data import StreamingPackedDataset
from hf_wlb.trainer.layouts import under_this_layout
from tests.support.documents import WORKLOAD
from tests.support.tiny_llama import random_documents

LENGTHS = [1 + (7 * n * n + 3 * n) % 29 for n in range(90)]
ROWS = [{"input_ids": document} for document in random_documents(LENGTHS)]
N = 4


def loader(packer: Any, size: int, dp_size: int, dp_rank: int = 0, n: int = N, **more: Any) -> WLBDataLoader:
    assert size * dp_size == n
    config = PackingConfig(context_length=32, micro_batches_per_replica=size, dp_size=dp_size, packer=packer, **more)
    # One process stands for every replica, so there is nobody to compare plans with.
    return WLBDataLoader(ROWS, config, WORKLOAD, dp_rank=dp_rank, shuffle=True, seed=2)


def stream(size: int, dp_size: int, **more: Any) -> StreamingPackedDataset:
    config = PackingConfig(context_length=32, micro_batches_per_replica=size, dp_size=dp_size, **more)
    return StreamingPackedDataset(ROWS, config, WORKLOAD)


def steps_of(data: WLBDataLoader, steps: int | None = None) -> list[list[tuple[int, int]]]:
    """Documents of the whole steps, as their plans say, of up to so many."""
    found: list[list[tuple[int, int]]] = []
    for number, _ in enumerate(data):
        assert data.plan is not None
        if number % data.config.micro_batches_per_replica == 0:
            found.append(sorted((d.index, d.start) for d in data.plan.documents))
        if steps is not None and number + 1 == steps * data.config.micro_batches_per_replica:
            break
    return found


@pytest.mark.parametrize("packer", ["steady", "wlb", "greedy", "next-fit", "concat-and-cut"])
@pytest.mark.parametrize("steps", [1, 3, None])
@pytest.mark.parametrize(("then", "now"), [((4, 1), (2, 2)), ((1, 4), (4, 1)), ((2, 2), (1, 4))])
def test_every_document_comes_once(packer: Any, steps: int | None, then: Any, now: Any) -> None:
    before = loader(packer, *then)
    done = steps_of(before, steps)
    state = before.state_dict()
    rests = []
    for rank in range(now[1]):
        after = loader(packer, *now, dp_rank=rank)
        after.load_state_dict(under_this_layout(state, after))
        rests.append(steps_of(after) if steps is not None else [])
    assert all(rest == rests[0] for rest in rests)
    seen = [document for step in done + rests[0] for document in step]
    assert len(seen) == len(set(seen))
    assert {index for index, _ in seen} == set(range(len(ROWS)))
    if packer in ("next-fit", "concat-and-cut"):  # the very steps of a run that was never interrupted
        assert done + rests[0] == steps_of(loader(packer, *now))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("layout", [(1, 4), (2, 2), (4, 1)])
def test_parameters_may_be_shared_out_on_the_way(before: bool, layout: Any) -> None:
    data = loader("steady", *layout, sharded_parameters=before)
    done, state = steps_of(data, 3), data.state_dict()
    after = loader("steady", *layout, sharded_parameters=not before)
    with pytest.raises(ValueError, match=f"sharded_parameters: {before} -> {not before}"):  # control
        after.load_state_dict(state)
    after.load_state_dict(under_this_layout(state, after))
    rest = steps_of(after)
    seen = [document for step in done + rest for document in step]
    assert len(seen) == len(set(seen)) and {index for index, _ in seen} == set(range(len(ROWS)))
    if layout[1] == 1:  # nobody to wait for
        assert done + rest == steps_of(loader("steady", *layout))


@pytest.mark.parametrize(("layout", "stages"), [((4, 1), 1), ((2, 2), 2)])
def test_a_stream_may_share_parameters_out_where_plans_stay_the_same(layout: Any, stages: int) -> None:
    before, after = (stream(*layout, pp_size=stages, sharded_parameters=kind) for kind in (False, True))
    reading = iter(before)
    for _ in range(2 * layout[0]):
        next(reading)
    after.load_state_dict(under_this_layout(before.state_dict(), after))
    rest = [micro_batch["input_ids"].tolist() for micro_batch in after]
    assert rest == [micro_batch["input_ids"].tolist() for micro_batch in reading] and len(rest) > 4


def test_a_stream_whose_plans_would_change_is_refused() -> None:
    before, after = (stream(2, 2, sharded_parameters=kind) for kind in (False, True))
    next(iter(before))
    with pytest.raises(ValueError, match=r"read with: 2 replicas with .*, got 2 replicas that share parameters out"):
        under_this_layout(before.state_dict(), after)


def test_control_without_planning_the_old_step_documents_are_lost_or_repeated() -> None:
    before = loader("steady", 4, 1)
    done = steps_of(before, 3)
    after = loader("steady", 2, 2)
    state = under_this_layout(before.state_dict(), after)
    wrong = {**before.state_dict(), "handed_out": 0}
    after.load_state_dict({**wrong, "planner": {**wrong["planner"], "config": state["planner"]["config"]}})
    seen = [document for step in done + steps_of(after) for document in step]
    assert len(seen) != len(set(seen))


def test_the_same_layout_leaves_the_state_as_it_is() -> None:
    data = loader("steady", 2, 2)
    steps_of(data, 2)
    state = data.state_dict()
    assert under_this_layout(state, loader("steady", 2, 2)) == state
    assert under_this_layout({"schema": "?"}, data) == {"schema": "?"}


def test_another_number_of_micro_batches_is_refused() -> None:
    data = loader("steady", 2, 2)
    steps_of(data, 2)
    with pytest.raises(
        ValueError, match=r"with 4 micro-batches a step, and this run has 8 \(gradient_accumulation_steps: 2 -> 4\)"
    ):
        under_this_layout(data.state_dict(), loader("steady", 4, 2, n=8))
