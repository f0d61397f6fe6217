"""Small runs of two replicas of two pipeline stages in which something goes wrong in step 3; see ``faulty_training``.

    python -m tests.support.faulty_pipeline FOLDER killed raises ...

Ranks 0 and 2 are stage 0 of the two replicas, ranks 1 and 3 stage 1.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_wlb.data import WLBDataCollator
from hf_wlb.parallel import ParallelMesh, ParallelSizes
from hf_wlb.parallel.pipeline import verify_micro_batches
from tests.support.faulty_training import launch_all

RANKS = 4
STEP = 3  # in which the fault happens
STEPS = 5
MICRO_BATCHES = 4  # of a step on each replica
POISONED = 1  # the one whose loss is not finite

#: The rank to which something happens, by case; -1 for none.
CASES: dict[str, int] = {
    "whole": -1,
    "without": -1,
    "killed": 3,
    "between": 2,
    "raises": 1,
    "memory": 0,
    "count": 2,
    "plans": 3,
    "tokens": 1,
    "nan stops": 1,
    "nan skipped": 3,
    "compared": -1,
}
WITH_AGENT = ("raises",)

Step = list[int]  # tokens of every micro-batch
_STEP: Step = [16, 12, 16]
#: By rank and the number of its shard (of its replica, without context parallelism): what it is about to run.
STEPS_TO_RUN: dict[str, Callable[[int, int], Step]] = {
    "the same": lambda rank, shard: _STEP,
    "other shards": lambda rank, shard: [16 + shard, *_STEP[1 + shard :]],
    "number": lambda rank, shard: _STEP[: 2 if rank == 2 else 3],
    "order": lambda rank, shard: _STEP if rank != 3 else [_STEP[0], _STEP[2], _STEP[1]],
    "all": lambda rank, shard: [rank],
}
SPLITS = {"cp": {"pp_size": 2, "cp_size": 2}, "dp": {"pp_size": 2, "dp_shard_size": 2}}


class DropsStep(TrainerCallback):
    """Trains a step without its gradients, as if it had not been there."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            kwargs["model"].zero_grad()


class RaisesBetween(TrainerCallback):
    """Fails while a step's micro-batches are collected."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            self.fail()


class ForgetfulCollator(WLBDataCollator):
    """Loses the last token of the third micro-batch of a step."""

    made = 0

    def __call__(self, features: Any) -> dict[str, Any]:
        self.made += 1
        if self.made == (STEP - 1) * MICRO_BATCHES + 3:
            last = features[-1]["input_ids"]
            features = [*features[:-1], *([{"input_ids": last[:-1]}] if len(last) > 1 else [])]
        return super().__call__(features)


def run(case: str, folder: Path) -> None:
    """Be one rank of a case."""
    if case == "compared":
        compare(folder)
    else:
        train(case, folder)


def compare(folder: Path) -> None:
    """Only what is compared before a step; writes what that came to. Ranks 0 and 1 are stage 0."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    for split, sizes in SPLITS.items():
        mesh = ParallelMesh.of(ParallelSizes.of(RANKS, **sizes), "cpu")
        for case, steps in STEPS_TO_RUN.items():
            try:
                verify_micro_batches(steps(torch.distributed.get_rank(), mesh.cp_rank + mesh.dp_rank), STEP, mesh)
                found[split][case] = ""
            except RuntimeError as error:
                found[split][case] = str(error)
    rank = torch.distributed.get_rank()
    torch.distributed.barrier()  # none leaves while another one still talks
    (folder / f"compared_{rank}.json").write_text(json.dumps(found))


def train(case: str, folder: Path) -> None:
    """Train on this rank; writes its losses and a hash of its weights."""
    from tests.support.training import rows_of, trainer_of

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    affected = rank == CASES[case]

    def fail() -> None:
        (folder / f"{case}_at.txt").write_text(str(time.monotonic()))
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError("CUDA out of memory.") if case == "memory" else OSError("the disk is full")

    lengths = (5, 9, 14, 3, 7, 20, 2, 11, 6, 4, 25, 8, 13) * 10
    options: dict[str, Any] = {
        "pp_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "callbacks": [DropsStep()] if case == "without" else [],
        "on_nonfinite_loss": "skip" if case == "nan skipped" else "stop",
    }
    if affected and case == "between":
        options["callbacks"] = [RaisesBetween(fail)]
    if affected and case == "count":
        options["gradient_accumulation_steps"] -= 1
    if affected and case == "plans":
        lengths = (*lengths[:-1], 12)
    if affected and case == "tokens":
        options["data_collator"] = ForgetfulCollator()
    trainer, recorder = trainer_of(folder / f"output_{case}", rows_of(lengths), **options)
    if affected and case in ("killed", "raises", "memory"):
        _fail_in_layer(trainer, fail, backward=case == "memory")
    if affected and case.startswith("nan"):
        _poison(trainer)
    trainer.train()
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    found = {"losses": recorder.losses, "logs": recorder.logs, "weights": digest.hexdigest()}
    (folder / f"{case}_{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # else gloo may abort a process whose peers have gone


def _fail_in_layer(trainer: Any, fail: Callable[[], None], *, backward: bool) -> None:
    """While this stage's layer computes the step's third micro-batch, and its neighbour another one."""
    calls = iter(range(1000))
    (layer,) = [layer for layer in trainer.model.model.layers if any(True for _ in layer.parameters())]

    def called(*_: Any) -> None:
        if next(calls) == (STEP - 1) * MICRO_BATCHES + 2:
            fail()

    if backward:
        layer.mlp.register_full_backward_hook(called)
    else:
        layer.mlp.register_forward_hook(called)


def _poison(trainer: Any) -> None:
    """The loss of one of the step's micro-batches."""
    train, steps = trainer._runner.train, iter(range(1, 1000))

    def poisoned(micro_batches: Any, forward: Any, before_backward: Any) -> Any:
        step, calls = next(steps), iter(range(1000))

        def once_nan(inputs: Any) -> Any:
            loss, call = forward(inputs), next(calls)
            return loss * float("nan") if (step, call) == (STEP, POISONED) else loss

        return train(micro_batches, once_nan, before_backward)

    trainer._runner.train = poisoned


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    launch_all(sys.argv[2:], Path(sys.argv[1]), run, RANKS, WITH_AGENT)
