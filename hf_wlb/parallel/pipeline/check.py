"""Refusing models whose stages, one after the other, would not be the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_wlb.parallel.pipeline.parts import ModelParts, find_parts
from hf_wlb.parallel.pipeline.stage import as_stage

_PROBE = [1, 2, 1, 2, 1]


def check_pipeline(model: PreTrainedModel, ranges: Sequence[range]) -> ModelParts:
    """Refuses a model that cannot be cut so, by running it whole and in stages over a few tokens.

    Does not talk to other ranks.

    Args:
        model: Whole; with its weights.
        ranges: The layers of every stage.

    Raises:
        ValueError: Names the model class and the reason.
    """
    parts = find_parts(model)
    tokens = torch.tensor([_PROBE], device=model.device)
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": torch.arange(len(_PROBE)).to(tokens)[None]}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            whole = model(**inputs, use_cache=False).logits
            hidden: torch.Tensor | None = None
            for layers in ranges:
                with as_stage(model, parts, layers) as stage:
                    hidden = stage.run(lambda given: model(**given, use_cache=False).logits, inputs, hidden)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be split into pipeline stages: its own code needs more of other stages' "
            f"modules than what they hand on ({error}). Set pp_size=1 for this model."
        ) from error
    finally:
        model.train(training)
    assert hidden is not None
    # The very same operations: only their order on a machine's threads may differ.
    if hidden.shape != whole.shape or (hidden - whole).abs().max() > 1e-3 * whole.abs().max():
        raise ValueError(
            f"{type(model).__name__} cannot be split into pipeline stages: run one after the other, they do not give "
            "the logits of the whole model. Set pp_size=1 for this model."
        )
    return parts
