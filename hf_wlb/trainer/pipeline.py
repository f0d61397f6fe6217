"""The part of ``WLBTrainer`` that trains with pipeline stages: a step's micro-batches are collected, and then run."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_utils import EvalLoopOutput

from hf_wlb.parallel import ParallelMesh, reduce_over_replicas
from hf_wlb.parallel.pipeline import PipelineRunner, PipelineStage, TiedEnds, average_gradients, verify_micro_batches
from hf_wlb.trainer.throughput import Throughput


class PipelineTraining(Trainer):
    """``Trainer`` whose model may be one stage of a pipeline; ``WLBTrainer`` sets the attributes.

    Trainer's loop goes on counting micro-batches: all but the last one of a step only wait, and with the last one all
    of them are run (1F1B). Clipping, the optimizer's step and logs are Trainer's, as without a pipeline.

    Attributes:
        micro_batch_losses: Of the last step, on the last stage.
    """

    mesh: ParallelMesh
    model: Any
    stage: PipelineStage
    throughput: Throughput
    micro_batch_losses: list[torch.Tensor]
    _logits_needed: bool
    _runner: PipelineRunner | None = None
    _tied_ends: TiedEnds | None = None
    _reduces_gradients: bool
    _collected: list[dict[str, Any]]
    _stage_runs = False

    def _set_up_runner(self) -> None:
        """Once this process has its stage."""
        if self.mesh.pp_size > 1:
            self._runner = PipelineRunner(self.stage, self.mesh, self.args.device, self.throughput.timer.measure)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self._collected, self.micro_batch_losses = [], []
        if self.mesh.pp_rank:  # else layers in the same place of two stages would drop the same units
            torch.manual_seed(stage_seed(self.args.seed, self.mesh.pp_rank))
        return found

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Trainer's; a step that was broken off leaves nothing."""
        self._collected = []
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Trainer's; in a pipeline, of all of the step's micro-batches with the last of them.

        Returns:
            The loss, the same on all stages.
        """
        if self._runner is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        self._collected.append(self._prepare_inputs(inputs))
        self.micro_batch_losses = []
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._collected = self._collected, []
        tokens = [int(given["input_ids"].shape[1]) for given in micro_batches]
        verify_micro_batches(tokens, self.state.global_step + 1, self.mesh)

        def forward(given: dict[str, Any]) -> Any:
            with self.compute_loss_context_manager():
                if not self.mesh.is_last_stage:
                    return model(**given)
                with self._on_a_stage():
                    return self.compute_loss(model, given, num_items_in_batch=num_items_in_batch)

        def before_backward(last: bool) -> None:
            reduce_over_replicas(self.model, now=last)

        self.micro_batch_losses = self._runner.train(micro_batches, forward, before_backward)
        if self._reduces_gradients:
            average_gradients(self.model.parameters(), self.mesh.token_group)
        if self._tied_ends is not None:
            self._tied_ends.sum_gradients()
        own = torch.stack(self.micro_batch_losses).sum().float() if self.mesh.is_last_stage else None
        return self._runner.links.from_last(own, (), torch.float32)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; in a pipeline all stages must call it together, and all of them get the loss.

        Logits come along where they are asked for, and nothing else that a model may return.
        """
        if self._runner is None or self._stage_runs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        wants_outputs = bool(kwargs.pop("return_outputs", args[0] if args else False))

        def forward(given: dict[str, Any]) -> Any:
            if not self.mesh.is_last_stage:
                return model(**given)
            return super(PipelineTraining, self).compute_loss(model, given, return_outputs=True, **kwargs)

        found = self._runner.evaluate(inputs, forward)
        loss, outputs = found if found is not None else (None, None)
        links, device = self._runner.links, self.args.device
        loss = links.from_last(None if loss is None else loss.float(), (), torch.float32)
        if not wants_outputs:
            return loss
        logits = None
        if self._logits_needed:
            own = None if outputs is None else cast(torch.Tensor, outputs["logits"])
            kind = torch.zeros(2, dtype=torch.int64, device=device)
            if own is not None:
                kind = torch.tensor([own.shape[-1], _LOGITS.index(own.dtype)], device=device)
            width, dtype = links.from_last(kind if own is not None else None, (2,), torch.int64).tolist()
            logits = links.from_last(own, (1, int(inputs["input_ids"].shape[1]), width), _LOGITS[dtype])
        return loss, CausalLMOutputWithPast(loss=cast(Any, loss), logits=cast(Any, logits))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Trainer's; hidden states may be of another type than in training."""
        with self._other_type():
            return super().evaluation_loop(*args, **kwargs)

    @contextlib.contextmanager
    def _on_a_stage(self) -> Iterator[None]:
        """Inside, ``compute_loss``, which a subclass may override, is that of the last stage alone."""
        self._stage_runs = True
        try:
            yield
        finally:
            self._stage_runs = False

    @contextlib.contextmanager
    def _other_type(self) -> Iterator[None]:
        if self._runner is None:
            yield
            return
        self._runner.links.forget_type()
        try:
            yield
        finally:
            self._runner.links.forget_type()


def stage_seed(seed: int, stage: int) -> int:
    """The seed of a stage behind the first, so that every stage draws random numbers of its own.

    >>> stage_seed(0, 1) != stage_seed(0, 2)
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} stage {stage}".encode(), digest_size=4).digest(), "little")


_LOGITS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
