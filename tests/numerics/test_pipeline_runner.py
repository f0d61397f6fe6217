"""What a pipeline stage keeps of a micro-batch between its forward and its backward."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_wlb.parallel.pipeline.runner import PipelineRunner

WIDTH, TOKENS = 8, 5


class MiddleStage:
    """A layer between two others; what it computed is watched."""

    is_first, is_last = False, False

    def __init__(self) -> None:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=WIDTH))
        self.model = SimpleNamespace(config=config)
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def run(self, forward: Any, inputs: Any, received: torch.Tensor) -> torch.Tensor:
        output = received + torch.tanh(self.layer(received))
        self.computed = weakref.ref(output.untyped_storage())
        return output


def runner_of(stage: MiddleStage) -> PipelineRunner:
    mesh: Any = SimpleNamespace(pp_group=object(), pp_rank=1, pp_size=3)
    return PipelineRunner(stage, mesh, torch.device("cpu"))  # type: ignore[arg-type]


def received() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def test_what_was_sent_is_not_kept() -> None:
    stage = MiddleStage()
    _flight, output = runner_of(stage)._forward({}, lambda given: None, received())
    assert not output.requires_grad and stage.computed() is not None  # still to be sent
    del output
    assert stage.computed() is None
    _flight, kept = runner_of(stage)._forward({}, lambda given: None, received())
    assert stage.computed() is not None and kept is not None  # control: whoever holds it keeps it


def test_its_gradient_goes_on_from_what_stands_for_it() -> None:
    stage, upstream = MiddleStage(), torch.randn(1, TOKENS, WIDTH)
    runner = runner_of(stage)
    flight, output = runner._forward({}, lambda given: None, received())
    found = runner._backward(flight, upstream)
    gradients = [parameter.grad.clone() for parameter in stage.layer.parameters()]
    stage.layer.zero_grad()
    given = received().requires_grad_()
    expected = stage.run(None, {}, given)
    assert torch.equal(output, expected)
    expected.backward(upstream)
    assert torch.equal(found, given.grad)
    assert all(
        torch.equal(own, parameter.grad) for own, parameter in zip(gradients, stage.layer.parameters(), strict=True)
    )
    assert not torch.equal(found, upstream)  # control: not merely handed through


def test_a_gradient_of_another_shape_is_refused() -> None:
    stage = MiddleStage()
    runner = runner_of(stage)
    flight, _ = runner._forward({}, lambda given: None, received())
    with pytest.raises(RuntimeError, match="invalid gradient at index 0"):
        runner._backward(flight, torch.randn(1, TOKENS + 1, WIDTH))
