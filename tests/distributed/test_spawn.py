"""The spawn helper itself: order, errors, time limits, and that nothing survives it."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import RankError, run_distributed


def _sum_of_ranks(rank: int, world_size: int, factor: int) -> tuple[int, float, int]:
    total = torch.tensor(float(rank * factor))
    dist.all_reduce(total)
    return rank, total.item(), torch.get_num_threads()


def test_values_come_back_in_rank_order_from_one_process_group() -> None:
    assert run_distributed(_sum_of_ranks, 3, 10) == [(0, 30.0, 1), (1, 30.0, 1), (2, 30.0, 1)]


def _scaled(rank: int, world_size: int, tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(0.3 * (world_size - 1 - rank))  # rank 0 returns last
    return tensor * rank


def test_tensors_travel_and_a_late_rank_keeps_its_place() -> None:
    values = run_distributed(_scaled, 2, torch.arange(3.0))
    assert [value.tolist() for value in values] == [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]


def _accelerate_view(rank: int, world_size: int, through: str) -> tuple[str, int, int, int]:
    from accelerate import Accelerator, PartialState

    state = Accelerator().state if through == "Accelerator" else PartialState(cpu=True)
    return state.distributed_type.value, state.num_processes, state.process_index, state.local_process_index


@pytest.mark.parametrize("through", ["Accelerator", "PartialState"])
def test_accelerate_sees_the_same_ranks(through: str) -> None:
    values = run_distributed(_accelerate_view, 2, through)
    assert values == [("MULTI_CPU", 2, 0, 0), ("MULTI_CPU", 2, 1, 1)]


def _offline(rank: int, world_size: int) -> tuple[str, bool, bool]:
    import datasets
    import huggingface_hub

    return os.environ["HF_HUB_OFFLINE"], huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE


def test_no_rank_asks_the_hub_whatever_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert run_distributed(_offline, 2) == [("1", True, True)] * 2
    assert "HF_HUB_OFFLINE" not in os.environ  # the ranks' environment is theirs


def _raise_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("no such document: 17")
    dist.barrier()  # would wait for rank 1 until the time limit


def test_a_raising_rank_brings_its_traceback_and_ends_the_others_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="Rank 1 of 2 failed") as caught:
        run_distributed(_raise_on_rank_one, 2, timeout_s=500)
    assert caught.value.rank == 1
    assert "in _raise_on_rank_one" in str(caught.value)
    assert "KeyError: 'no such document: 17'" in str(caught.value)
    assert time.monotonic() - begin < 250


def _die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_without_a_word_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="Rank 0 of 2 failed:\nit ended with exit code 7"):
        run_distributed(_die, 2)


def _hang_with_a_child(rank: int, world_size: int, pid_folder: str) -> None:
    if rank == 0:
        return
    child = subprocess.Popen(["sleep", "600"])
    (Path(pid_folder) / "child").write_text(str(child.pid))
    (Path(pid_folder) / "rank").write_text(str(os.getpid()))
    time.sleep(600)


def test_a_hanging_rank_is_named_with_its_place_and_killed_with_its_children(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_distributed(_hang_with_a_child, 2, str(tmp_path), timeout_s=5)
    assert str(caught.value).startswith("Rank 1 of 2 had not returned after 5 s; all ranks were ended.")
    assert "in _hang_with_a_child" in str(caught.value)
    assert time.monotonic() - begin < 100
    for name in ("rank", "child"):
        assert _is_gone(int((tmp_path / name).read_text())), f"the {name} process still runs"


def test_both_ranks_of_a_deadlock_are_named() -> None:
    with pytest.raises(TimeoutError, match="Ranks 0, 1 of 2 had not returned after 1 s") as caught:
        run_distributed(_wait_for_nobody, 2, timeout_s=1)
    assert str(caught.value).count("in _wait_for_nobody") == 2


def _wait_for_nobody(rank: int, world_size: int) -> None:
    dist.recv(torch.zeros(1), src=1 - rank)


def _is_gone(pid: int) -> bool:
    """Say whether no such process runs; a killed one may stay listed as a zombie until it is reaped."""
    for _ in range(50):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


def _unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def test_a_value_that_cannot_travel_is_that_ranks_error() -> None:
    with pytest.raises(RankError, match="Rank 0 of 1 failed") as caught:
        run_distributed(_unpicklable, 1)
    assert "lambda" in str(caught.value)


def test_bad_calls_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="world_size is 0; run_distributed needs at least one rank"):
        run_distributed(_unpicklable, 0)
    with pytest.raises(ValueError, match="pass a function from the top level of a module"):
        run_distributed(lambda rank, world_size: rank, 1)
