"""One run of the convergence benchmark, a process of its own: ``convergence_run.py JOB`` (see ``Job``)."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from convergence_cases import SCHEMA, Documents, Job, Settings, write_json
from transformers import LlamaConfig, PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_wlb import WLBTrainer, WLBTrainingArguments
from hf_wlb.data import WLBDataLoader
from hf_wlb.presets import ROPE_THETA
from hf_wlb.profiling import device_name, library_versions

WORKERS = 2  # that fetch and collate


class Recorder(TrainerCallback):
    """Keeps what every step trained, its loss, and the losses of held-out documents.

    Attributes:
        tokens: Of every step.
        late: Those among them whose documents had waited for at least one step.
        losses: Of every step, the mean over its tokens.
        evaluations: (step, tokens trained until then, held-out loss).
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.late: list[int] = []
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, int, float]] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reads the step's plan."""
        loader: WLBDataLoader = kwargs["train_dataloader"]
        plan = loader.plan
        assert plan is not None, "a step has a plan"
        self.tokens.append(plan.tokens)
        self.late.append(sum(document.length for document in plan.documents if document.arrived < plan.step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the losses."""
        if logs is not None and "loss" in logs:
            self.losses.append(round(float(logs["loss"]), 5))
        if logs is not None and "eval_loss" in logs:
            self.evaluations.append((state.global_step, sum(self.tokens), round(float(logs["eval_loss"]), 6)))


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


def training_arguments(job: Job) -> WLBTrainingArguments:
    """One pass over the documents in their order; only packer, micro-batches' room and seed differ between runs."""
    settings, run = job.settings, job.run
    sequential = run.packer == "next-fit"
    return WLBTrainingArguments(
        output_dir=str(Path(job.folder) / run.file_name),
        context_length=job.about["sequential_context"] if sequential else settings.context_length,
        max_document_tokens=settings.context_length,
        gradient_accumulation_steps=settings.micro_batches,
        packer=run.packer,
        plan_pp_size=settings.pp_size,
        workload_crossover=settings.crossover,
        shuffle_documents=False,
        num_train_epochs=1,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        lr_scheduler_type="cosine",
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        seed=settings.seed + run.seed_offset,
        data_seed=settings.seed,
        eval_strategy="steps",
        eval_steps=max(1, job.about["steps"] // settings.evaluations),
        prediction_loss_only=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        attention_kernel=settings.kernel,
        fused_loss="chunked",
        dataloader_num_workers=0 if job.use_cpu else WORKERS,
        bf16=not job.use_cpu,
        use_cpu=job.use_cpu,
    )


def train(job: Job) -> dict[str, Any]:
    """The run and all that is recorded of it."""
    start = time.perf_counter()
    recorder = Recorder()
    trainer = WLBTrainer(
        model=model_config(job.settings),
        model_init_kwargs={"dtype": "float32"},
        args=training_arguments(job),
        train_dataset=Documents(Path(job.documents) / "train"),
        eval_dataset=Documents(Path(job.documents) / "held_out"),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    if not recorder.evaluations or recorder.evaluations[-1][0] != trainer.state.global_step:
        trainer.evaluate()
    report = trainer.callback_handler.train_dataloader.report()
    if sum(recorder.tokens) != job.about["tokens"] or len(recorder.losses) != len(recorder.tokens):
        raise RuntimeError(
            f"{sum(recorder.tokens):,} tokens were trained in {len(recorder.tokens)} steps with "
            f"{len(recorder.losses)} losses, but the documents have {job.about['tokens']:,} tokens."
        )
    return {
        "schema": SCHEMA,
        "settings": asdict(job.settings),
        "fingerprint": job.about["fingerprint"],
        "run": asdict(job.run),
        "device": device_name(trainer.args.device),
        "attention_kernel": ", ".join(trainer.attention_kernels),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "versions": library_versions(),
        "seconds": round(seconds, 1),
        "seconds_before": round(began - start, 1),
        "packing": {
            name: round(value, 5) for name, value in report.to_dict().items() if isinstance(value, int | float)
        },
        "delayed_share": round(sum(recorder.late) / sum(recorder.tokens), 5),
        "evaluations": recorder.evaluations,
        "tokens": recorder.tokens,
        "loss": recorder.losses,
    }


def main(words: list[str]) -> int:
    """Trains what the job file says; 2 for what the user can mend."""
    job = Job.load(Path(words[0]))
    if not job.use_cpu and not torch.cuda.is_available():
        print("Error: there is no GPU here; --use-cpu trains without one (with --quick, or it takes days).")
        return 2
    write_json(Path(job.folder) / f"{job.run.file_name}.json", train(job))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
