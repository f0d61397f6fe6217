"""Measures what one layer, the embedding, and the head with the loss take for every micro-batch of sampled steps.

Started by ``stage_times.py``, which says what to do in the end-to-end benchmark's ``Job``, one a configuration.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from end_to_end import Job
from end_to_end_cases import (
    Settings,
    Turn,
    Variant,
    chosen_variants,
    documents,
    lengths_of,
    sharder_of,
    streams,
    turns,
)
from end_to_end_run import GIB, arguments, launch_line, model_config, with_streams
from exchange_prices import CLUSTER, exchange_cluster, exchange_row, with_exchange
from stage_times_compose import PARTS, compose, planned_shards
from stage_times_exchange import Filler, StandInExchange
from step_prices import StepPrices

from hf_wlb.attention import AttentionContext, check_isolation, register
from hf_wlb.attention.registration import MASKLESS
from hf_wlb.compilation import compile_decoder_layers
from hf_wlb.data import WLBDataCollator
from hf_wlb.lengths import load_lengths
from hf_wlb.loss import HeadLoss
from hf_wlb.parallel import ParallelMesh, ParameterLayout
from hf_wlb.parallel.pipeline import PipelineStage, cut_stage, find_parts, materialise, skeleton
from hf_wlb.profiling import device_name
from hf_wlb.profiling.pieces import micro_batch
from hf_wlb.profiling.timing import Stopwatch
from hf_wlb.sharding import Sharder
from hf_wlb.trainer.attention import TrainerAttention
from hf_wlb.trainer.stages import stage_layout
from hf_wlb.trainer.training_loss import TrainingLoss
from hf_wlb.training_args import WLBTrainingArguments
from hf_wlb.workload import WorkloadModel
from hf_wlb.workload.model_flops import ModelFlops

#: Matrix products before a step's first micro-batch, some 50 ms of them on a GPU: the host is ahead of it then, and
#: its clocks are those of a GPU at work.
_LEAD_IN, _LEAD_IN_SIZE = 30, 8192
#: Tokens of the documents of the first micro-batches, with which layers are compiled: numbers that are multiples of 16,
#: for which some kernels are made apart, and others.
_FIRST = ((1027,), (512, 512), (2048, 2035, 5))

Inputs = dict[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """What a step's micro-batches took.

    Attributes:
        times: Seconds of every rank for every micro-batch, ``[ranks][micro-batches]``, by the names of
            ``stage_times_compose.PARTS``.
        queue_seconds: Of the host, to queue all layers.
        loss: Of a token, the mean over micro-batches.
        peak_gib: Allocated at most.
    """

    times: dict[str, list[list[float]]]
    queue_seconds: float
    loss: float
    peak_gib: float


class Parts:
    """One decoder layer, the embedding, and the last norm with head and loss, each as a stage that the trainer makes.

    Weights are float32, the type of a model made of a configuration, and computed in is what ``args`` say (bf16 by
    autocast on a GPU): as in the trainer, whose hidden states are then float32 as well.

    Args:
        config: Of a model that is long enough for all documents; how many layers it has does not matter.
        args: The trainer's.
        most_tokens: Of a micro-batch.

    Attributes:
        hidden_bytes: Of a token's hidden states, as one stage sends them to the next.
    """

    def __init__(self, config: Any, args: WLBTrainingArguments, most_tokens: int) -> None:
        self._device, self._dtype = args.device, args.compute_dtype
        register()
        # Of three layers the middle one is a stage with a neighbour on either side.
        self._config = copy.deepcopy(config)
        self._config.num_hidden_layers = 3
        self._layer = self._cut(lambda count: range(1, 2), args)
        self._attending = check_isolation(self._layer.model, 1)
        compile_decoder_layers(self._layer.model, args, layers=1)
        if args.activation_checkpointing:
            self._layer.model.activation_checkpointing_enable()
        self._embedding = self._cut(lambda count: range(0), args)
        self._head = self._cut(lambda count: range(count, count), args)
        self._stages = (self._layer, self._embedding, self._head)
        for stage in self._stages:
            stage.model.to(self._device).train()
        self._loss = trainer_loss(self._head.model, args)
        self._filler = Filler()
        shape = (most_tokens, int(config.hidden_size))
        # What the stage before would have sent, and the gradient that the one behind would have.
        self._received, self._gradient = (torch.randn(shape, device=self._device) for _ in range(2))
        self.hidden_bytes = shape[1] * self._received.element_size()

    def _cut(self, layers: Callable[[int], range], args: WLBTrainingArguments) -> PipelineStage:
        model = skeleton(self._config, attn_implementation=MASKLESS)
        parts = find_parts(model)
        stage = cut_stage(model, parts, layers(parts.count))
        materialise(model, ParameterLayout(ParallelMesh(), copies=stage.copies), seed=args.seed)
        return stage

    def context(self, args: WLBTrainingArguments) -> tuple[AttentionContext, tuple[str, ...]]:
        """How the trainer with these arguments attends, and the names of its kernels.

        Raises:
            ValueError: If its kernel cannot be had.
        """
        attention = TrainerAttention(args, self._attending, ParallelMesh())
        return attention.plan_of({}, training=True)["wlb_context"], attention.kernels

    def step(
        self, lengths: Sequence[Sequence[int]], context: AttentionContext, sharder: Sharder | None = None
    ) -> Measured:
        """Runs all parts over a step's micro-batches, forward and backward; of each all ranks' shards, in turns.

        Args:
            lengths: Of the documents, micro-batch by micro-batch.
            context: See ``context``.
            sharder: Shares micro-batches out over ranks, which exchange nothing but believe they do, see
                ``stage_times_exchange``; None where one rank has them to itself.

        Raises:
            RuntimeError: If it is nothing like training.
        """
        on_gpu = self._device.type == "cuda"
        ranks = 1 if sharder is None else sharder.config.cp_size
        shards = [shard for own in lengths for shard in self._shards(own, context, sharder)]
        numbers = [torch.tensor(sum(own), device=self._device) for own in lengths for _ in range(ranks)]
        for stage in self._stages:
            stage.model.zero_grad()
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._watch = Stopwatch(self._device, ahead_ms=0.0)
        self._lead_in()
        begun = time.perf_counter()
        for inputs in shards:
            self._time(self._layer, inputs)
        queued = time.perf_counter() - begun
        for inputs in shards:
            self._time(self._embedding, inputs)
        losses = [
            self._time(self._head, {**inputs, "num_items_in_batch": number})
            for inputs, number in zip(shards, numbers, strict=True)
        ]
        taken = np.array(self._watch.take()).reshape(len(self._stages), len(lengths), ranks, 2)
        times = {name: taken[part, :, :, way].T.tolist() for name, (part, way) in PARTS.items()}
        loss = float(torch.stack(losses).sum()) / len(lengths)
        if not math.isfinite(loss):
            raise RuntimeError(f"The loss is {loss}: these are not the times of training.")
        peak = torch.cuda.max_memory_allocated(self._device) / GIB if on_gpu else 0.0
        return Measured(times, queued, loss, peak)

    def _shards(self, lengths: Sequence[int], context: AttentionContext, sharder: Sharder | None) -> Iterator[Inputs]:
        """A micro-batch of random tokens as every rank has it, with its plan and its way to attend."""
        if sharder is None:
            yield micro_batch(self._config, np.array(lengths), self._device, context)
            return
        for rank in range(sharder.config.cp_size):
            drawn = np.random.default_rng(0)  # all ranks have the same documents
            rows = [{"input_ids": drawn.integers(self._config.vocab_size, size=length)} for length in lengths]
            inputs = WLBDataCollator(sharder=sharder, cp_rank=rank)(rows)
            del inputs["wlb_info"]  # for whoever trains
            exchange = StandInExchange(rank, sharder.config.cp_size, self._filler)
            moved = {name: value.to(self._device) if hasattr(value, "to") else value for name, value in inputs.items()}
            yield {**moved, "wlb_context": replace(context, exchange=exchange)}

    def _time(self, stage: PipelineStage, inputs: Inputs) -> torch.Tensor:
        """A forward and a backward of a part, as ``PipelineRunner`` runs them; returns a detached loss on the last."""
        tokens = int(inputs["input_ids"].shape[1])
        came = None if stage.is_first else self._received[:tokens][None].detach().requires_grad_()
        self._watch.start()
        with self._computing():
            out = stage.run(self._compute_loss if stage.is_last else lambda given: stage.model(**given), inputs, came)
        self._watch.stop()
        if stage.is_first and out.dtype != self._received.dtype:
            raise RuntimeError(f"Hidden states are {out.dtype}, but layers were measured with {self._received.dtype}.")
        self._watch.start()
        torch.autograd.backward(out, None if stage.is_last else self._gradient[:tokens][None])
        self._watch.stop()
        return out.detach() if stage.is_last else self._received.new_zeros(())

    def _compute_loss(self, given: Inputs) -> torch.Tensor:
        with contextlib.nullcontext() if self._loss is None else self._loss.enabled():
            return torch.as_tensor(self._head.model(**given).loss)

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        """What Accelerate wraps a model's forward in."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def _lead_in(self) -> None:
        if self._device.type != "cuda":
            return
        square = torch.randn(_LEAD_IN_SIZE, _LEAD_IN_SIZE, device=self._device, dtype=torch.bfloat16)
        out = torch.empty_like(square)
        for _ in range(_LEAD_IN):
            torch.mm(square, square, out=out)


def trainer_loss(model: Any, args: WLBTrainingArguments) -> HeadLoss | None:
    """What the trainer computes the loss of a last stage by; None for the model's own."""
    mesh = ParallelMesh()
    trainer: Any = SimpleNamespace(
        args=args, mesh=mesh, layout=ParameterLayout(mesh), compute_loss_func=None, _head_loss=None
    )
    TrainingLoss._set_up_loss(trainer, model)
    found: HeadLoss | None = trainer._head_loss
    return found


def alone(job: Job) -> Job:
    """The job as one process does it, which runs the context-parallel ranks in turns."""
    return replace(job, settings=replace(job.settings, cp_size=1))


def sharders_of(settings: Settings, variants: Sequence[Variant], workload: WorkloadModel) -> dict[str, Sharder]:
    """What shares every variant's micro-batches out, one for those that share alike; none without ranks that share."""
    if settings.cp_size == 1:
        return {}
    made = {own.sharding: sharder_of(own, settings.cp_size, workload) for own in variants}
    return {own.name: made[own.sharding] for own in variants}


def _rounded(seconds: Sequence[Sequence[float]], sharder: Sharder | None) -> list[Any]:
    """For the results: of every rank for every micro-batch, or of every micro-batch where one rank has them."""
    rows: list[Any] = np.round(seconds, 7).tolist()
    return rows if sharder is not None else rows[0]


class Configuration:
    """A configuration's planned steps, and how they are measured and written down.

    Args:
        job: What is done.
        parts: Measure it.

    Attributes:
        name: As the user calls it.
        first_round: That no launch has completed before.
        turns: Of the warm-up (round -1) and of every round, in their order.
        expected_seconds: Of its next round: the longest one so far, or as many steps of the warm-up as it has.

    Raises:
        ValueError: If it cannot be planned, or its kernel cannot be had.
    """

    def __init__(self, job: Job, parts: Parts) -> None:
        self.name, self.first_round = configuration_name(job), job.first_round
        self._job, self._parts, settings = job, parts, job.settings
        args, config = arguments(alone(job), 1), model_config(settings)
        self._layout = stage_layout(config, args)
        self._flops = ModelFlops.from_config(config)
        self._context, kernels = parts.context(args)
        variants, same = chosen_variants(settings.cp_size, job.variants)
        cluster = exchange_cluster(exchange_row(", ".join(kernels))["cluster"], device_name(args.device))
        workload = with_exchange(args.workload_model(config), settings.cp_size, cluster)
        self._sharders = sharders_of(settings, variants, workload)
        given = documents(load_lengths(job.lengths), settings, job.replicas)
        about = self._launch_row(args, kernels, workload, same)
        prices = StepPrices.of(about)
        found = streams(variants, given, settings, job.replicas, workload, prices.of_sharding)
        self._about = with_streams(about, prices, found)
        self.turns: dict[int, list[Turn]] = {}
        for turn in turns(found, job.first_round, job.rounds, job.warmups, settings.seed):
            self.turns.setdefault(turn.round, []).append(turn)
        self.expected_seconds, self._rounds = 0.0, list[float]()
        self._variants = len(variants)

    def _launch_row(
        self,
        args: WLBTrainingArguments,
        kernels: Sequence[str],
        workload: WorkloadModel,
        same: Mapping[str, str],
    ) -> Row:
        """As the end-to-end benchmark writes it of a trainer; what is composed is said to be."""
        stages, replicas = self._job.settings.pp_size, self._job.replicas
        mesh = SimpleNamespace(pp_rank=0, pp_size=stages, dp_size=replicas)
        trainer: Any = SimpleNamespace(
            args=args, mesh=mesh, attention_kernels=kernels, stage_layout=self._layout, model=None
        )
        return {
            **launch_line(self._job, trainer, workload, same),
            "composed": True,
            "stage_of_rank": list(range(stages)) * replicas,  # one rank a stage: the slowest of those that share it
            "handover": {"cluster": CLUSTER, "bytes_per_token": self._parts.hidden_bytes},
            **({"exchange": exchange_row(", ".join(kernels))} if self._sharders else {}),
        }

    def warm_up(self) -> None:
        """Compiles, lets memory grow and writes the launch down."""
        longest = self._job.settings.context_length
        first = [[min(length, longest) for length in own] for own in _FIRST]
        if self._sharders:  # one step warms up for all shardings, so each has the largest micro-batch beforehand
            largest = max((m for turn in self.turns[-1] for m in turn.step.plan.micro_batches), key=lambda m: m.tokens)
            first.append(lengths_of(largest))
        for sharder in {id(own): own for own in self._sharders.values()}.values() or (None,):
            self._parts.step(first, self._context, sharder)
        self._write(self._about)
        begun = time.perf_counter()
        for turn in self.turns[-1]:
            self._run(turn)
        self.expected_seconds = (time.perf_counter() - begun) / len(self.turns[-1]) * self._variants

    def run_round(self, number: int) -> None:
        """Measures a step of every variant."""
        begun = time.perf_counter()
        for turn in self.turns[number]:
            self._run(turn)
        self._rounds.append(time.perf_counter() - begun)
        self.expected_seconds = max(self._rounds)

    def _run(self, turn: Turn) -> None:
        begun = time.perf_counter()
        plan = turn.step.plan
        replicas = [[lengths_of(micro_batch) for micro_batch in replica] for replica in plan.replicas]
        sharder = self._sharders.get(turn.variant)
        planned = [planned_shards(replica, sharder) for replica in replicas]
        measured = [self._parts.step(replica, self._context, sharder) for replica in replicas]
        times = {name: [_rounded(own.times[name], sharder) for own in measured] for name in PARTS}
        lengths = [document.length for document in plan.documents]
        row = {
            "kind": "step",
            "launch": self._job.launch,
            "composed": True,
            "variant": turn.variant,
            "round": turn.round,
            "step": plan.step,
            "predicted": turn.predicted,
            "tokens": plan.tokens,
            "documents": len(lengths),
            "longest": max(lengths),
            "flops": self._flops.documents(lengths),
            "micro_batch_lengths": replicas,
            "times": times,
            **({"shards": [shards for shards, _ in planned]} if sharder is not None else {}),
            "plan_seconds": turn.step.plan_seconds,
            "shard_seconds": max(seconds for _, seconds in planned),  # a rank plans those of its own replica
            "peak_gib": [round(max(own.peak_gib for own in measured), 3)],
            "queue_seconds": round(sum(own.queue_seconds for own in measured), 5),
            "loss": round(float(np.mean([own.loss for own in measured])), 5),
        }
        seconds = compose(self._about, row).seconds
        wall = time.perf_counter() - begun
        self._write({**row, "seconds": round(seconds, 5), "wall_seconds": round(wall, 3)})
        said = "warm-up" if turn.round < 0 else f"round {turn.round}, {turn.variant}"
        print(f"{self.name}, {said}: a step of {seconds:.3f} s, measured in {wall:.1f} s", flush=True)

    def _write(self, row: Row) -> None:
        with open(self._job.output, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run(jobs: Sequence[Job], begun: float) -> list[str]:
    """Measures all configurations, in turns; one that fails is told and left out, and the others go on.

    Args:
        jobs: One a configuration; they differ in context, kernel, micro-batches and profile only.
        begun: When the program did, by ``time.perf_counter``.

    Returns:
        The configurations that failed.

    Raises:
        ValueError: If the model cannot be measured.
    """
    settings = [job.settings for job in jobs]
    longest = replace(settings[0], context_length=max(own.context_length for own in settings))
    most_tokens = max(*(max(own.s_max, own.context_length) for own in settings), *map(sum, _FIRST))
    parts = Parts(model_config(longest), arguments(alone(jobs[0]), 1), most_tokens)
    failed: list[str] = []
    left: list[Configuration] = []
    for job in jobs:
        with _told(configuration_name(job), failed):
            made = Configuration(job, parts)
            made.warm_up()
            left.append(made)
    for place in range(max(job.rounds for job in jobs)):
        for made in list(left):
            number = made.first_round + place
            fits = time.perf_counter() - begun + made.expected_seconds <= jobs[0].seconds
            if number in made.turns and fits:
                with _told(made.name, failed):
                    made.run_round(number)
            if made.name in failed or number not in made.turns or not fits:
                left.remove(made)
    return failed


def configuration_name(job: Job) -> str:
    """As the user calls the configuration that a job measures; its launch is named after it."""
    return job.launch.split("-", 1)[1]


@contextlib.contextmanager
def _told(name: str, failed: list[str]) -> Iterator[None]:
    """What fails inside is said, and its name kept."""
    try:
        yield
    except Exception as error:  # whatever a kernel or the lack of memory raises: the other configurations can go on
        if not isinstance(error, ValueError):
            traceback.print_exc()
        print(f"Error: configuration {name}: {error}", file=sys.stderr, flush=True)
        failed.append(name)
