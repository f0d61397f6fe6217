"""One run of the convergence benchmark, a process of its own: ``convergence_run.py JOB`` (see ``Job``)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from convergence_cases import BASE, SCHEMA, Job, Settings, write_json
from convergence_documents import Documents, copied_strings
from transformers import LlamaConfig, PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_wlb import WLBTrainer, WLBTrainingArguments
from hf_wlb.data import WLBDataLoader
from hf_wlb.packing import measure
from hf_wlb.presets import ROPE_THETA
from hf_wlb.profiling import device_name, library_versions

WORKERS = 2  # that fetch and collate
LOGGED = 100  # steps: losses are fetched from the device, and a line goes to the run's log
STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"


class Recorder(TrainerCallback, ExportableState):
    """Keeps what every step trained, its loss, and the losses of held-out documents; checkpoints hold it as well.

    Args:
        identity: Of the run: a checkpoint of another one is not gone on from.

    Attributes:
        tokens: Of every step.
        late: Those among them whose documents had waited for at least one step.
        losses: Of every step, the mean over its tokens; up to date after ``collect``.
        evaluations: (step, tokens trained until then, held-out loss).
        copying: (step, tokens trained until then, loss on random strings, loss on their repetitions).
        seconds: Trained by earlier calls.
    """

    def __init__(self, identity: str = "") -> None:
        self.identity = identity
        self.tokens: list[int] = []
        self.late: list[int] = []
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, int, float]] = []
        self.copying: list[tuple[int, int, float, float]] = []
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._own: list[torch.Tensor] = []  # losses of micro-batches, on the device
        self._counts: list[int] = []  # how many of them a step has
        self._string_loss = 0.0

    @property
    def total_seconds(self) -> float:
        """Trained by this call and earlier ones."""
        return self.seconds + time.perf_counter() - self._began

    def add(self, loss: torch.Tensor) -> None:
        """Takes the loss of a micro-batch, its part of its step's; nothing is waited for."""
        self._own.append(loss)

    def collect(self) -> None:
        """Fetches from the device the losses of steps that are done."""
        if not self._counts:
            return
        values = torch.stack(self._own).tolist()
        self._own = []
        for count in self._counts:
            self.losses.append(round(sum(values[:count]), 5))
            del values[:count]
        self._counts = []

    def state(self) -> dict[str, Any]:
        """As ``ExportableState`` wants it."""
        self.collect()
        kept = ("tokens", "late", "losses", "evaluations", "copying")
        attributes = {name: list(getattr(self, name)) for name in kept}
        return {"args": {"identity": self.identity}, "attributes": {**attributes, "seconds": self.total_seconds}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Goes on with the records of the checkpoint, if there is one."""
        if state.global_step:
            saved = cast(dict[str, Any], state.stateful_callbacks)[type(self).__name__]
            for name, value in saved["attributes"].items():
                setattr(self, name, value)
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reads the step's plan."""
        loader: WLBDataLoader = kwargs["train_dataloader"]
        plan = loader.plan
        assert plan is not None, "a step has a plan"
        self.tokens.append(plan.tokens)
        self.late.append(sum(document.length for document in plan.documents if document.arrived < plan.step))
        self._counts.append(len(self._own) - sum(self._counts))
        if len(self._counts) >= LOGGED:
            self.collect()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the losses of evaluations, and says how far the run is."""
        logs = logs or {}
        step, trained = state.global_step, sum(self.tokens)
        if "loss" in logs:
            speed = float(logs["tokens_per_second"])
            print(f"step {step:,}: loss {logs['loss']:.4f}, {speed:,.0f} tokens/s", flush=True)
        if "eval_held_out_loss" in logs:
            self.evaluations.append((step, trained, round(float(logs["eval_held_out_loss"]), 6)))
            print(f"step {step:,}: held-out loss {logs['eval_held_out_loss']:.4f}", flush=True)
        if "eval_copy_first_loss" in logs:
            self._string_loss = float(logs["eval_copy_first_loss"])
        if "eval_copy_second_loss" in logs:
            again = float(logs["eval_copy_second_loss"])
            self.copying.append((step, trained, round(self._string_loss, 5), round(again, 5)))
            print(f"step {step:,}: copy loss {again:.4f}, of the string itself {self._string_loss:.4f}", flush=True)


class RecordedTrainer(WLBTrainer):
    """Tells a recorder every micro-batch's loss: logs would wait for the device in every step.

    Args:
        recorder: A callback as well.
        **kwargs: Of ``WLBTrainer``.
    """

    def __init__(self, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(callbacks=[recorder], **kwargs)
        self._recorder = recorder
        self.remove_callback(PrinterCallback)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trainer's."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._recorder.add(loss)
        return loss


def model_config(settings: Settings) -> LlamaConfig:
    """A Llama without special tokens of its own: what ends a document is a token as others."""
    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.context_length,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )


def _shape(job: Job) -> dict[str, Any]:
    """What differs between the base and the runs, and between packers."""
    settings = job.settings
    if job.run.is_base:
        return {
            "context_length": job.about["base_context"],
            "max_document_tokens": settings.base_context_length,
            "gradient_accumulation_steps": 1,
            "learning_rate": settings.base_learning_rate,
            "eval_steps": max(1, settings.base_steps // settings.evaluations),
        }
    sequential = job.run.packer == "next-fit"
    return {
        "context_length": job.about["sequential_context"] if sequential else settings.context_length,
        "max_document_tokens": settings.context_length,
        "gradient_accumulation_steps": settings.micro_batches,
        "plan_pp_size": settings.pp_size,
        "learning_rate": settings.learning_rate,
        "eval_steps": max(1, job.about["steps"] // settings.evaluations),
    }


def training_arguments(job: Job, *, resumed: bool = False) -> WLBTrainingArguments:
    """One pass over the documents; runs differ only in packer, micro-batches' room, and seeds of weights or order."""
    settings, run = job.settings, job.run
    steps = settings.base_steps if run.is_base else job.about["steps"]
    return WLBTrainingArguments(
        output_dir=str(job.output),
        **_shape(job),
        packer=run.packer,
        workload_crossover=settings.crossover,
        shuffle_documents=True,
        num_train_epochs=1,
        warmup_steps=settings.warmup,
        lr_scheduler_type="cosine",
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        seed=settings.seed + run.seed_offset,
        data_seed=settings.seed + run.order_offset,
        eval_strategy="steps",
        eval_on_start=job.base is not None and not resumed,
        prediction_loss_only=True,
        logging_steps=LOGGED,
        save_strategy="steps" if job.checkpoints else "no",
        save_steps=max(1, -(-steps // (job.checkpoints + 1))),
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        attention_kernel=settings.kernel,
        fused_loss=settings.fused_loss,
        torch_compile=settings.compiled,
        dataloader_num_workers=0 if job.use_cpu else WORKERS,
        bf16=not job.use_cpu,
        use_cpu=job.use_cpu,
    )


# ---- going on ----


def identity_of(job: Job) -> str:
    """A hash of what a run depends on."""
    parts = (asdict(job.settings), asdict(job.run), job.fingerprint, job.base, job.use_cpu)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def latest_checkpoint(job: Job) -> Path | None:
    """The one to go on from; those whose writing was cut do not count.

    Raises:
        ValueError: If it is of a run with other settings, documents or base.
    """
    found = sorted(job.output.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    for folder in reversed(found):
        try:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if state["stateful_callbacks"][Recorder.__name__]["args"]["identity"] != identity_of(job):
            raise ValueError(
                f"{folder} is of a run with other settings, documents or base. Remove it to begin anew, or give "
                "another --folder."
            )
        return folder
    return None


def end_with_parent() -> None:
    """Lets this process end when the one that started it does, however that ends."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- the run ----


def train(job: Job) -> dict[str, Any]:
    """The run and all that is recorded of it."""
    start = time.perf_counter()
    places = {name: Documents(Path(job.documents), *place) for name, place in job.about["places"].items()}
    held_out, documents = (
        places[name] for name in (("held_out_of_base", "base") if job.run.is_base else ("held_out", "train"))
    )
    checkpoint = latest_checkpoint(job)
    recorder = Recorder(identity_of(job))
    trainer = RecordedTrainer(
        recorder,
        model=model_config(job.settings) if job.base is None else str(Path(job.folder) / BASE.file_name),
        model_init_kwargs={"dtype": "float32"},
        args=training_arguments(job, resumed=checkpoint is not None),
        train_dataset=documents,
        eval_dataset={"held_out": held_out, **copied_strings(job.settings)},
    )
    began = time.perf_counter()
    if checkpoint is not None:
        print(f"goes on from {checkpoint.name}", flush=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    recorder.collect()
    seconds = recorder.total_seconds
    if not recorder.evaluations or recorder.evaluations[-1][0] != trainer.state.global_step:
        trainer.evaluate()
    loader = cast(WLBDataLoader, trainer.callback_handler.train_dataloader)
    report = measure(loader.sampler.planner(0))  # the loader's own lacks what was trained before a checkpoint
    if sum(recorder.tokens) != documents.tokens or len(recorder.losses) != len(recorder.tokens):
        raise RuntimeError(
            f"{sum(recorder.tokens):,} tokens were trained in {len(recorder.tokens)} steps with "
            f"{len(recorder.losses)} losses, but the documents have {documents.tokens:,} tokens."
        )
    weights = {}
    if job.run.is_base:
        trainer.save_model(str(job.output))
        weights["weights"] = hashlib.sha256((job.output / WEIGHTS).read_bytes()).hexdigest()[:16]
    return {
        "schema": SCHEMA,
        "settings": asdict(job.settings),
        "fingerprint": job.fingerprint,
        "base": job.base,
        "run": asdict(job.run),
        "device": device_name(trainer.args.device),
        "attention_kernel": ", ".join(trainer.attention_kernels),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "versions": library_versions(),
        "seconds": round(seconds, 1),
        "seconds_before": round(began - start, 1),
        **weights,
        "packing": {
            name: round(value, 5) for name, value in report.to_dict().items() if isinstance(value, int | float)
        },
        "delayed_share": round(sum(recorder.late) / sum(recorder.tokens), 5),
        "evaluations": recorder.evaluations,
        "copying": recorder.copying,
        "tokens": recorder.tokens,
        "loss": recorder.losses,
    }


def main(words: list[str]) -> int:
    """Trains what the job file says; 2 for what the user can mend."""
    end_with_parent()
    job = Job.load(Path(words[0]))
    if not job.use_cpu and not torch.cuda.is_available():
        print("Error: there is no GPU here; --use-cpu trains without one (with --quick, or it takes days).")
        return 2
    write_json(job.results, train(job))
    for folder in job.output.glob("checkpoint-*"):
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
