"""Short runs of WLBTrainer on a tiny Llama, with everything recorded that a reference needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_wlb import WLBDataLoader, WLBTrainer, WLBTrainingArguments
from tests.support.documents import WORKLOAD
from tests.support.oracle import Row, gradients_of, loss_and_gradients, relative_error, worst_error
from tests.support.tiny_llama import random_documents, tiny_llama

#: Two epochs of these take 4 and 5 steps of 2 micro-batches of 16 tokens: see test_trainer.py.
LENGTHS = (5, 1, 9, 14, 3, 1, 7, 20, 2, 11, 6, 4, 25, 1, 8, 13, 1, 2)

#: One way to split of every kind, over two processes.
TWO_RANKS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "cp_size": {"cp_size": 2},
    "pp_size": {"pp_size": 2},
    "tp_size": {"tp_size": 2},
    "fsdp": {"fsdp": True},
}


def rows_of(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[dict[str, list[int]]]:
    """A data set of random documents."""
    return [{"input_ids": document} for document in random_documents(lengths, seed)]


def arguments(folder: Path | str, **options: Any) -> WLBTrainingArguments:
    """SGD with a constant learning rate and no clipping, logging every step: a run that an oracle can repeat."""
    settings: dict[str, Any] = {
        "context_length": 16,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return WLBTrainingArguments(output_dir=str(folder), **{**settings, **options})


class Recorder(TrainerCallback):
    """What happened at every step: its documents, its loss, and the first step's gradients."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logs: list[dict[str, Any]] = []
        self.plans: list[Any] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.implementations: set[str] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.plans.append(kwargs["train_dataloader"].plan)
        self.implementations.add(kwargs["model"].config._attn_implementation)
        if not self.gradients:
            self.gradients = gradients_of(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def documents(self, step: int, rows: Sequence[Row]) -> list[Row]:
        """The documents, or pieces, that all replicas trained in a step."""
        found: list[Row] = []
        for document in self.plans[step].documents:
            row: Any = rows[document.index]
            part = slice(document.start, document.start + document.length)
            found.append({name: values[part] for name, values in row.items()})
        return found


def trainer_of(folder: Path | str, rows: Any = None, model: Any = None, **options: Any) -> tuple[WLBTrainer, Recorder]:
    """A trainer and its recorder; options named like WLBTrainer's own go there, the others into the arguments."""
    own = {"eval_dataset", "compute_metrics", "data_collator", "callbacks", "compute_loss_func", "workload"}
    given = {name: options.pop(name) for name in own & options.keys()}
    recorder = Recorder()
    trainer = WLBTrainer(
        model=tiny_llama() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=rows_of() if rows is None else rows,
        workload=given.pop("workload", WORKLOAD),
        callbacks=[recorder, *given.pop("callbacks", [])],
        **given,
    )
    return trainer, recorder


def train(folder: Path | str, rows: Any = None, model: Any = None, **options: Any) -> tuple[WLBTrainer, Recorder]:
    """Train to the end."""
    resume = options.pop("resume_from_checkpoint", None)
    trainer, recorder = trainer_of(folder, rows, model, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, recorder


def check_first_step(recorder: Any, rows: Any, model: Any, label_smoothing: float = 0.0) -> float:
    """The worst relative error of the first step's loss and gradients."""
    loss, gradients = loss_and_gradients(model, recorder.documents(0, rows), label_smoothing)
    loss_error = relative_error(torch.tensor(recorder.losses[0]), torch.tensor(loss))
    return max(loss_error, worst_error(recorder.gradients, gradients))


def steps_by_epoch(trainer: Any) -> list[int]:
    """Steps of every epoch that a trainer planned; none of a stream."""
    data = trainer._train_data
    planned = range(trainer.state.num_train_epochs) if isinstance(data, WLBDataLoader) else ()
    return [data.sampler.steps(epoch) for epoch in planned]
