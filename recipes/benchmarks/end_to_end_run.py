"""One process of an end-to-end launch: one model, and the sampled steps of all variants, in turns.

Started by ``end_to_end.py`` through torchrun, with a JSON file that says what to do.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from end_to_end import Job
from end_to_end_cases import (
    Settings,
    Stream,
    Turn,
    chosen_variants,
    documents,
    lengths_of,
    sharder_of,
    streams,
    turns,
)
from exchange_prices import CLUSTER, exchange_cluster, with_exchange
from step_prices import StepPrices
from transformers import PrinterCallback, TrainerCallback

from hf_wlb import WLBDataCollator, WLBTrainer, WLBTrainingArguments
from hf_wlb.data.progress import PassProgress, PlannedStep, TellsProgress
from hf_wlb.lengths import load_lengths
from hf_wlb.packing import ReaderCounts
from hf_wlb.parallel import gather_figures
from hf_wlb.presets import preset_config
from hf_wlb.profiling import device_name, library_versions
from hf_wlb.sharding import Sharder
from hf_wlb.trainer.throughput import ComputeTimer, peak_of
from hf_wlb.workload import WorkloadModel
from hf_wlb.workload.model_flops import ModelFlops

GIB = 2**30


class SpanTimer(ComputeTimer):
    """Also keeps when every forward and every backward began and ended.

    Attributes:
        spans: Since the step's beginning; as host times, or events on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.mark()

    def mark(self) -> None:
        """A step begins now."""
        self.origin = self._now()
        self.spans: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Times a forward, a backward, or both of a micro-batch where there is no pipeline."""
        begin = self._now()
        with super().measure():
            yield
        self.spans.append((begin, self._now()))

    def seconds(self) -> list[float]:
        """Begin and end of one after the other, from the step's beginning; once the GPU has done its work."""
        return [self._since(moment) for span in self.spans for moment in span]

    def _since(self, moment: Any) -> float:
        return self.origin.elapsed_time(moment) / 1000 if self._on_gpu else moment - self.origin


class ChosenSteps(TellsProgress):
    """Stands where the trainer's data loader does, and hands out the micro-batches of chosen steps.

    A whole step is collated before ``begin`` is called, as workers would have done it ahead.

    Args:
        trainer: Whose they are.
        order: The steps.
        sharders: How every variant's micro-batches are shared out.
        begin: Called before a step's first micro-batch, with the seconds that planning its shards took.
    """

    def __init__(
        self,
        trainer: WLBTrainer,
        order: Sequence[Turn],
        sharders: Mapping[str, Sharder],
        begin: Callable[[Turn, float], None],
    ) -> None:
        self._mesh, self._order, self._begin = trainer.mesh, order, begin
        self._vocabulary, self._seed = int(trainer.model.config.vocab_size), trainer.args.seed
        self._sharders = sharders
        self._collators = {
            name: WLBDataCollator().for_rank(sharder, self._mesh.cp_rank)
            if self._mesh.cp_size > 1
            else WLBDataCollator()
            for name, sharder in sharders.items()
        }
        self._progress = PassProgress(trainer.packing, place=self._mesh.place)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for turn in self._order:
            plan, collator = turn.step.plan, self._collators[turn.variant]
            seconds = self._shard_seconds(turn)
            micro_batches = self._collated(turn, collator)
            planned = PlannedStep(plan, {}, None, [], ReaderCounts(), turn.step.plan_seconds)
            self._progress.begin(planned, salt=collator.fingerprint)
            self._begin(turn, seconds)
            yield from micro_batches

    def _shard_seconds(self, turn: Turn) -> float:
        if self._mesh.cp_size == 1:
            return 0.0
        start = time.perf_counter()
        for micro_batch in turn.step.plan.replicas[self._mesh.dp_rank]:
            self._sharders[turn.variant].plan(lengths_of(micro_batch))
        return time.perf_counter() - start

    def _collated(self, turn: Turn, collator: WLBDataCollator) -> list[dict[str, Any]]:
        """Random tokens, the same ones on all ranks of a replica."""
        generator = np.random.default_rng((self._seed, turn.round + 1, turn.step.plan.step, self._mesh.dp_rank))
        found = []
        for micro_batch in turn.step.plan.replicas[self._mesh.dp_rank]:
            rows = [generator.integers(0, self._vocabulary, size=length) for length in lengths_of(micro_batch)]
            found.append(collator([{"input_ids": row} for row in rows]))
        return found


class Recorder(TrainerCallback):
    """Takes every step's figures down, a line of JSON each.

    Args:
        job: What is done.
        device: This process's.
        flops: What documents cost the model.

    Attributes:
        timer: To be the trainer's.
    """

    def __init__(self, job: Job, device: torch.device, flops: ModelFlops) -> None:
        self._job, self._device, self._flops = job, device, flops
        self.timer = SpanTimer(device)
        self._launched, self._longest_round = time.perf_counter(), 0.0
        self._round_begun = self._launched
        self._turn: Turn | None = None
        self._step: dict[str, Any] = {}

    def begin(self, turn: Turn, shard_seconds: float) -> None:
        """All ranks have the step's micro-batches: they begin it together."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        gather_figures([0.0])
        self._turn, self._shard_seconds = turn, shard_seconds
        self.timer.mark()
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Behind the optimizer's step."""
        turn = self._turn
        assert turn is not None, "a step was begun"
        peak = 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device) / GIB
        now = time.perf_counter()
        own = [now - self._begun, now - self._launched, now - self._round_begun, peak, self._shard_seconds]
        rows = gather_figures([*own, *self.timer.seconds()])
        plan, known = turn.step.plan, len(own)
        lengths = [document.length for document in plan.documents]
        self._step = {
            "kind": "step",
            "launch": self._job.launch,
            "variant": turn.variant,
            "round": turn.round,
            "step": plan.step,
            "seconds": round(max(row[0] for row in rows), 5),
            "predicted": turn.predicted,
            "tokens": plan.tokens,
            "documents": len(lengths),
            "longest": max(lengths),
            "flops": self._flops.documents(lengths),
            "micro_batch_lengths": [[lengths_of(m) for m in replica] for replica in plan.replicas],
            "plan_seconds": turn.step.plan_seconds,
            "shard_seconds": max(row[4] for row in rows),
            "peak_gib": [round(row[3], 3) for row in rows],
            "spans": [[round(moment, 5) for moment in row[known:]] for row in rows],
        }
        # The first rank's clock decides for all.
        _, since_launch, since_round, *_ = rows[0]
        if turn.closes:
            self._longest_round = max(self._longest_round, since_round)
            control.should_training_stop |= since_launch + self._longest_round > self._job.seconds
        if turn.closes or turn.round < 0:
            self._round_begun = time.perf_counter()
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The trainer's own figures of the step follow it."""
        if self._step and "loss" in logs:
            self._step |= {"loss": logs["loss"]}
            self._step |= {name: round(value, 5) for name, value in logs.items() if name.startswith("cp_")}
            self.write(self._step)
            self._step = {}

    def write(self, line: Mapping[str, Any]) -> None:
        """Of the first process only."""
        if os.environ.get("RANK", "0") != "0":
            return
        with open(self._job.output, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class ChosenStepsTrainer(WLBTrainer):
    """``WLBTrainer`` over chosen steps.

    Args:
        sharders: See ``ChosenSteps``.
        recorder: Takes the steps' figures down.
        **kwargs: Of WLBTrainer.
    """

    def __init__(self, *, sharders: Mapping[str, Sharder], recorder: Recorder, **kwargs: Any) -> None:
        self._order: Sequence[Turn] = ()
        self._sharders, self._recorder = sharders, recorder
        super().__init__(callbacks=[recorder], **kwargs)
        self.remove_callback(PrinterCallback)

    def train_steps(self, order: Sequence[Turn]) -> None:
        """Trains these, in this order."""
        self._order, self.args.max_steps = order, len(order)
        self.train()

    def _set_up_runner(self) -> None:
        self.throughput.timer = self._recorder.timer
        super()._set_up_runner()

    def get_train_dataloader(self) -> Any:
        """The chosen steps, which have no length: so the trainer goes by ``max_steps``."""
        chosen: Any = ChosenSteps(self, self._order, self._sharders, self._recorder.begin)
        self._train_data = chosen
        return chosen


def arguments(job: Job, steps: int) -> WLBTrainingArguments:
    """The trainer's, for all variants: what they differ in comes with the steps."""
    settings = job.settings
    return WLBTrainingArguments(
        output_dir=job.folder,
        context_length=settings.context_length,
        max_document_tokens=settings.context_length,
        max_tokens_per_micro_batch=settings.s_max,
        pp_stage_layers=[int(size) for size in settings.stage_layers.split(",")] if settings.stage_layers else None,
        gradient_accumulation_steps=settings.micro_batches,
        pp_size=settings.pp_size,
        cp_size=settings.cp_size,
        tp_size=settings.tp_size,
        attention_kernel=settings.kernel,
        activation_checkpointing=settings.recompute,
        torch_compile=settings.compiled,
        workload_crossover=settings.crossover or None,
        workload_profile=job.profile or None,
        max_steps=steps,
        learning_rate=1e-5,
        seed=settings.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=job.use_cpu,
        bf16=not job.use_cpu,
    )


def model_config(settings: Settings) -> Any:
    """The preset with as many layers as are to be trained."""
    config = preset_config(settings.model)
    config.num_hidden_layers = settings.layers or config.num_hidden_layers
    config.max_position_embeddings = max(config.max_position_embeddings, settings.context_length)
    return config


def workload_of(args: WLBTrainingArguments, config: Any, settings: Settings) -> WorkloadModel:
    """What the arguments say that documents cost; a profile that has no exchange gets the simulator's price of it."""
    alone = copy.copy(args)
    alone.cp_size = 1  # what the arguments would refuse to do without is added here
    workload = alone.workload_model(config)
    return with_exchange(workload, settings.cp_size, exchange_cluster(CLUSTER, device_name(args.device)))


def launch_line(job: Job, trainer: WLBTrainer, workload: WorkloadModel, same: Mapping[str, str]) -> dict[str, Any]:
    """What the results keep of a launch, but for its streams: see ``with_streams``."""
    device = trainer.args.device
    return {
        "kind": "launch",
        "launch": job.launch,
        "settings": asdict(job.settings),
        "device": device_name(device),
        "devices": trainer.args.world_size,
        "kernel": ", ".join(trainer.attention_kernels),
        "peak_flops": peak_of(device) or 0.0,
        "replicas": trainer.mesh.dp_size,
        "stage_of_rank": [int(row[0]) for row in gather_figures([float(trainer.mesh.pp_rank)])],
        "stage_layers": list(trainer.stage_layout.sizes) if trainer.mesh.pp_size > 1 else [],
        "versions": library_versions(),
        "first_round": job.first_round,
        "same_as": dict(same),
        "workload": workload.to_dict(),
        **job.about,
    }


def with_streams(about: Mapping[str, Any], prices: StepPrices, found: Sequence[Stream]) -> dict[str, Any]:
    """A launch's line with its streams, and what their steps' predictions go by."""
    return {
        **about,
        "predicted_by": prices.source,
        "streams": {stream.variant.name: stream.figures() for stream in found},
    }


def main() -> None:
    """Plans, warms up, and takes turns."""
    job = Job.load(Path(sys.argv[1]))
    settings = job.settings
    variants, same = chosen_variants(settings.cp_size, job.variants)
    args, config = arguments(job, 1), model_config(settings)
    workload = workload_of(args, config, settings)
    replicas = job.replicas
    given = documents(load_lengths(job.lengths), settings, replicas)
    sharders = {variant.name: sharder_of(variant, settings.cp_size, workload) for variant in variants}
    recorder = Recorder(job, args.device, ModelFlops.from_config(config))
    trainer = ChosenStepsTrainer(sharders=sharders, recorder=recorder, model=config, args=args, workload=workload)
    about = launch_line(job, trainer, workload, same)
    prices = StepPrices.of(about)
    found = streams(variants, given, settings, replicas, workload, prices.of_sharding)
    recorder.write(with_streams(about, prices, found))
    trainer.train_steps(turns(found, job.first_round, job.rounds, job.warmups, settings.seed))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
