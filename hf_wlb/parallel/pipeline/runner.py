"""One forward one backward (1F1B): a step's micro-batches go through the stages one behind the other.

The order is DeepSpeed's ``TrainSchedule`` (PipeDream-Flush). What its instructions mean here is only to talk and to
compute: gradients are summed over replicas, clipped and applied by whoever calls, as without a pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_wlb.parallel.mesh import ParallelMesh
from hf_wlb.parallel.pipeline.links import StageLinks
from hf_wlb.parallel.pipeline.stage import PipelineStage

Inputs = dict[str, Any]


class _Sent(torch.autograd.Function):
    """A number that stands for hidden states which were sent: its backward hands on the gradient that came for them.

    Nothing keeps the hidden states themselves, [1, tokens, hidden size] of every micro-batch between its forward and
    its backward: the layers that made them do not need them, and autograd would only look at their shape.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, came: list[torch.Tensor]) -> torch.Tensor:
        ctx.came = came
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradient_of_zero: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.came.pop(), None


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward on this stage.

    Attributes:
        received: From the stage before; None on the first one.
        end: The loss on the last stage, elsewhere what stands for the hidden states that were sent.
        came: Their gradient, once it is there.
    """

    received: torch.Tensor | None
    end: torch.Tensor
    came: list[torch.Tensor]


class PipelineRunner:
    """Runs micro-batches through this process's stage, together with the processes that are the other stages.

    Args:
        stage: This process's layers.
        mesh: This process's place.
        device: Where it computes.
        measure: Times every forward and every backward.
    """

    def __init__(
        self,
        stage: PipelineStage,
        mesh: ParallelMesh,
        device: torch.device,
        measure: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        from deepspeed.runtime.pipe import schedule

        self._schedule = schedule
        self._stage, self._mesh, self._measure = stage, mesh, measure
        self.links = StageLinks(mesh, int(stage.model.config.get_text_config().hidden_size), device)

    def train(
        self,
        micro_batches: Sequence[Inputs],
        forward: Callable[[Inputs], Any],
        before_backward: Callable[[bool], None] = lambda last: None,
    ) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches; gradients are added up. All stages must call this together.

        Args:
            micro_batches: Arguments of the whole model's forward, on the device; the same number and the same tokens
                on every stage.
            forward: Calls the model; on the last stage it returns the loss, whose gradient is to be taken.
            before_backward: Called with whether it is the step's last backward on this stage.

        Returns:
            Every micro-batch's loss, detached, on the last stage; elsewhere nothing.
        """
        names, here = self._schedule, self._mesh.pp_rank
        tokens = [int(inputs["input_ids"].shape[1]) for inputs in micro_batches]
        flying: dict[int, _InFlight] = {}
        losses: list[torch.Tensor] = []
        outgoing: dict[str, torch.Tensor] = {}
        done = {"forward": 0, "backward": 0}
        for instructions in names.TrainSchedule(len(micro_batches), self._mesh.pp_size, here).steps():
            kinds = {type(instruction) for instruction in instructions}
            computes_forward, computes_backward = names.ForwardPass in kinds, names.BackwardPass in kinds
            # Within an instruction list everything goes to, or comes from, the same neighbour.
            peer = here - 1 if kinds & {names.SendGrad, names.RecvActivation} else here + 1
            sends = kinds & {names.SendGrad, names.SendActivation}
            receives = kinds & {names.RecvActivation, names.RecvGrad}
            place = done["forward"] if computes_forward else done["backward"]
            if receives and not self.links.knows_type:
                self.links.tell_type()
            came = None
            if sends or receives:
                way = "gradient" if names.SendGrad in kinds else "hidden states"
                send = outgoing.pop(way) if sends else None
                came = self.links.exchange(peer, send, tokens[place] if receives else None)
            if computes_forward:
                flying[place], output = self._forward(micro_batches[place], forward, came)
                if self._stage.is_last:
                    losses.append(output)
                else:
                    outgoing["hidden states"] = output
                done["forward"] += 1
            elif computes_backward:
                before_backward(place == len(micro_batches) - 1)
                gradient = self._backward(flying.pop(place), came)
                if gradient is not None:
                    outgoing["gradient"] = gradient
                done["backward"] += 1
        self.links.finish()
        return losses

    def evaluate(self, inputs: Inputs, forward: Callable[[Inputs], Any]) -> Any:
        """One micro-batch's forward pass; all stages must call this together.

        Returns:
            What ``forward`` returned on the last stage; elsewhere nothing.
        """
        here = self._mesh.pp_rank
        received = None
        if not self._stage.is_first:
            if not self.links.knows_type:
                self.links.tell_type()
            received = self.links.exchange(here - 1, tokens=int(inputs["input_ids"].shape[1]))
        output = self._stage.run(forward, inputs, received)
        if self._stage.is_last:
            return output
        if self._stage.is_first and not self.links.knows_type:
            self.links.tell_type(output)
        self.links.exchange(here + 1, output)
        self.links.finish()
        return None

    def _forward(
        self, inputs: Inputs, forward: Callable[[Inputs], Any], received: torch.Tensor | None
    ) -> tuple[_InFlight, torch.Tensor]:
        """What is kept for backward, and the output, detached."""
        if received is not None:
            received.requires_grad_()
        with self._measure():
            output: torch.Tensor = self._stage.run(forward, inputs, received)
        if self._stage.is_first and not self.links.knows_type:
            self.links.tell_type(output)
        came: list[torch.Tensor] = []
        # Applied to a tensor without a graph, it is one without a graph.
        end = output if self._stage.is_last else _Sent.apply(output, came)  # type: ignore[no-untyped-call]
        return _InFlight(received, end, came), output.detach()

    def _backward(self, flight: _InFlight, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of what was received; None on the first stage."""
        if flight.end.requires_grad:  # else nothing before it is trained
            if gradient is not None:
                flight.came.append(gradient)
            with self._measure():
                torch.autograd.backward(flight.end)
        if flight.received is None:
            return None
        found = flight.received.grad
        return torch.zeros_like(flight.received) if found is None else found
