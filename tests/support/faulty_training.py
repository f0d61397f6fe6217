"""Small runs of two ranks in which something goes wrong on rank 1 in step 4: a script for torchrun, and a launcher.

    torchrun --nproc_per_node 2 -m tests.support.faulty_training killed FOLDER
    python -m tests.support.faulty_training --launch FOLDER killed worker ...

The second imports everything once and forks the ranks of one case after the other, which takes a fraction of the time.
It writes what came of each to FOLDER/outcomes.json.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_wlb.data import WLBDataCollator

STEP = 4  # in which the fault happens, after its first micro-batch
STEPS = 6
RANKS = 2
FAULTY_RANK = 1
SLOWNESS_S = 0.1  # by which rank 1 is slower in every micro-batch of the case "whole"
_LIMIT_S = 60.0

_SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
#: Arguments of the trainer, by case.
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "raises": {"dataloader_num_workers": 1},
    "raises late": {},
    "token": {"dataloader_num_workers": 1},
    "memory": {},
    "killed": _SAVES,
    "resumed": _SAVES,
    "worker": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1},
    "plans": {},
    "left alone": {},
    "terminated": {},
    "nan stops": {"on_nonfinite_loss": "stop"},
    "nan skipped": {"on_nonfinite_loss": "skip", **_SAVES},
    "decides": {},
    "decides, split": {},
}

#: Where in step ``STEP`` a callback of rank 1 alone sets which attribute of the control, and what else the run has.
DECISIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stops as a step begins": ("on_step_begin", "should_training_stop", {}),
    "stops in a step": ("on_substep_end", "should_training_stop", {}),
    "stops before the optimizer": ("on_pre_optimizer_step", "should_training_stop", {}),
    "stops after a step": ("on_step_end", "should_training_stop", {}),
    "stops after a step, no logs": ("on_step_end", "should_training_stop", {"logging_strategy": "no"}),
    "stops after a log": ("on_log", "should_training_stop", {}),
    "stops after an evaluation": ("on_evaluate", "should_training_stop", {"eval_strategy": "steps", "eval_steps": 1}),
    "stops after a checkpoint": ("on_save", "should_training_stop", _SAVES),
    "stops as an epoch begins": ("on_epoch_begin", "should_training_stop", {}),
    "stops after an epoch": ("on_epoch_end", "should_training_stop", {}),
    "ends the epoch as it begins": ("on_epoch_begin", "should_epoch_stop", {}),
    "ends the epoch in a step": ("on_substep_end", "should_epoch_stop", {"logging_strategy": "no"}),
    "ends the epoch": ("on_step_end", "should_epoch_stop", {}),
    "saves": ("on_step_end", "should_save", {}),
    "saves after a log": ("on_log", "should_save", {}),
    "evaluates": ("on_step_end", "should_evaluate", {}),
    "logs": ("on_step_end", "should_log", {"logging_strategy": "no"}),
}

#: Those in which rank 1 does something to itself.
FAULTS = ("raises", "raises late", "memory", "killed", "worker")
#: Those launched with torch's elastic agent, as torchrun does, instead of none.
WITH_AGENT = ("raises", "raises late")


class Fault(TrainerCallback):
    """Lets the case's fault happen on rank 1."""

    def __init__(self, case: str, folder: Path) -> None:
        self.case, self.folder = case, folder

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index != FAULTY_RANK or state.global_step != STEP - 1 or self.case not in FAULTS:
            return
        (self.folder / f"{self.case}_at.txt").write_text(str(time.monotonic()))
        if self.case in WITH_AGENT:
            raise OSError("the disk is full")
        if self.case == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "worker":
            import multiprocessing

            multiprocessing.active_children()[0].kill()


class UnknownToken(WLBDataCollator):
    """Puts a token that the model does not know into the first micro-batch of the faulty step."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token, self.made = token, 0

    def __call__(self, features: Any) -> dict[str, Any]:
        self.made += 1
        micro_batch = super().__call__(features)
        if self.made == 2 * STEP - 1:
            micro_batch["input_ids"][0, -1] = self.token
        return micro_batch


class Decides(TrainerCallback):
    """Sets an attribute of the control on rank 1 in the faulty step, or at its epoch's beginning or end."""

    def __init__(self, event: str, attribute: str) -> None:
        self.attribute = attribute
        setattr(self, event, self._decide)

    def _decide(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == FAULTY_RANK and state.global_step >= STEP - 1:
            setattr(control, self.attribute, True)


SPLITS: dict[str, dict[str, Any]] = {"cp": {"cp_size": 2}, "pp": {"pp_size": 2}, "fsdp": {"dp_shard_size": 2}}
#: By case, splits and decisions that are tried.
DECIDED: dict[str, tuple[dict[str, dict[str, Any]], Collection[str]]] = {
    "decides": ({"dp": {}}, DECISIONS),
    "decides, split": (SPLITS, ("stops as a step begins", "stops in a step", "saves")),
}


def decide(case: str, folder: Path) -> None:
    """One run after the other in which rank 1 alone decides something; writes what that came to, and the steps."""
    from tests.support.training import rows_of, trainer_of

    torch.set_num_threads(1)
    rows = rows_of((5, 9, 14, 3, 7, 20, 2, 11, 6, 4, 25, 8, 13) * 2)
    splits, decisions = DECIDED[case]
    found = {}
    for split, sizes in splits.items():
        for decision in decisions:
            event, attribute, options = DECISIONS[decision]
            given = {"num_train_epochs": 3, "eval_dataset": rows[:3], **options, **sizes}
            callbacks = [Decides(event, attribute)]
            trainer, recorder = trainer_of(folder / "output_decides", rows, callbacks=callbacks, **given)
            try:
                trainer.train()
                said = "no error"
            except RuntimeError as error:
                said = str(error)
            found[f"{split}: {decision}"] = [len(recorder.plans), said]
    (folder / f"{case}_{os.environ['RANK']}.json").write_text(json.dumps(found))


def train(case: str, folder: Path) -> None:
    """Train on this rank; writes its losses and logs."""
    from tests.support.tiny_llama import VOCABULARY
    from tests.support.training import rows_of, trainer_of

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    lengths = (5, 9, 14, 3, 7, 20, 2, 11, 6, 4, 25, 8, 13) * 4
    if case == "plans" and rank == FAULTY_RANK:
        lengths = (*lengths[:-1], 12)
    options = {"max_steps": STEPS, "optim": "adamw_torch", "learning_rate": 1e-3, **CASES[case]}
    output = folder / f"output_{'killed' if case == 'resumed' else case}"
    trainer, recorder = trainer_of(output, rows_of(lengths), callbacks=[Fault(case, folder)], **options)
    if rank == FAULTY_RANK:
        if case == "token":
            trainer.data_collator = UnknownToken(VOCABULARY)
        if "nan" in case:
            _poison(trainer)
        if case == "whole":  # which the logs must tell
            trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SLOWNESS_S))
    try:
        trainer.train(resume_from_checkpoint=True if case == "resumed" else None)
    finally:
        if case == "raises late" and rank == FAULTY_RANK:
            time.sleep(30)  # rank 0 leaves meanwhile, and the agent ends this one
    found = {"losses": recorder.losses, "logs": recorder.logs}
    (folder / f"{case}_{rank}.json").write_text(json.dumps(found))


def _poison(trainer: Any) -> None:
    compute, calls = trainer.compute_loss, iter(range(1000))

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        # The second micro-batch of the step.
        return loss * float("nan") if next(calls) == 2 * STEP - 1 else loss

    trainer.compute_loss = poisoned


def leave_alone(case: str) -> None:
    """A loop without a trainer: rank 1 fails and lives on for a while, rank 0 waits for it in a collective."""
    import torch.distributed as dist

    from hf_wlb.parallel.collectives import gather_objects
    from hf_wlb.parallel.failures import reporting_failures

    dist.init_process_group("gloo")
    waits = {"poll_s": 0.2, "grace_s": 0.5} if case == "left alone" else {"poll_s": 100.0, "grace_s": 100.0}
    other = gather_objects(os.getpid())[1 - dist.get_rank()]
    try:
        with reporting_failures(lambda: STEP, **waits):
            dist.barrier()  # both are watched by now: a signal to one that is not would end it without a word
            if dist.get_rank() == FAULTY_RANK:
                raise KeyError("a column")
            dist.all_reduce(torch.ones(1))
    except KeyError:
        if case == "terminated":  # as an agent does
            os.kill(other, signal.SIGTERM)
        time.sleep(2)
        raise


def run(case: str, folder: Path) -> None:
    """Run one case as one rank."""
    if case in ("left alone", "terminated"):
        leave_alone(case)
    elif case in DECIDED:
        decide(case, folder)
    else:
        train(case, folder)


# ---- launches ----


Run = Callable[[str, Path], None]
"""What a rank does in a case."""


def launch_all(
    cases: list[str], folder: Path, run: Run = run, ranks: int = RANKS, with_agent: Collection[str] = WITH_AGENT
) -> None:
    """Fork the ranks of one case after the other; write what came of each to a file."""
    for name in ("tests.support.training", "torch._dynamo", "deepspeed", "torch.distributed.launcher.api"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # whatever ranks would import, each for itself
    gc.collect()
    gc.freeze()
    outcomes = {case: launch(case, folder, run, ranks, agent=case in with_agent) for case in cases}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def launch(case: str, folder: Path, run: Run, ranks: int, *, agent: bool) -> dict[str, Any]:
    """Fork the ranks, or their agent, wait for them, and tell their exit codes, output and time since the fault."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    count = 1 if agent else ranks
    outputs = [folder / f"{case}_{place}.txt" for place in range(count)]
    jobs: list[Callable[[], None]] = [
        partial(_be_rank, run, case, folder, place, ranks, port) for place in range(ranks)
    ]
    if agent:
        jobs = [partial(_be_agent, run, case, folder, ranks)]
    running = {_fork(job, output): place for place, (job, output) in enumerate(zip(jobs, outputs, strict=True))}
    codes: dict[int, int | None] = dict.fromkeys(range(count))
    while running and time.monotonic() - start < _LIMIT_S:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    end = time.monotonic()
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        "codes": list(codes.values()),
        "seconds": end - max(start, fault_time(case, folder)),
        "outputs": [path.read_text() for path in outputs],
    }


def fault_time(case: str, folder: Path) -> float:
    """When the fault happened, by the clock that all processes share; 0 where it was from the beginning."""
    file = folder / f"{case}_at.txt"
    return float(file.read_text()) if file.exists() else 0.0


def _fork(job: Callable[[], None], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        job()
    except BaseException:  # what Python does with it at the end of a script
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)
    sys.exit(0)


def _be_rank(run: Run, case: str, folder: Path, rank: int, ranks: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run(case, folder)


def _be_agent(run: Run, case: str, folder: Path, ranks: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=case,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, _run_forked)(run, case, folder)


def _run_forked(run: Run, case: str, folder: Path) -> None:
    # What torchrun would start is a process of its own: it has no handler of the agent's, and shows its error itself.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        run(case, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def main(arguments: list[str]) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if arguments[0] == "--launch":
        launch_all(arguments[2:], Path(arguments[1]))
    else:
        run(arguments[0], Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
