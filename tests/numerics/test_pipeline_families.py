"""Which models can be pipeline stages: every accepted family, two layers in two stages; others are refused in words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_wlb.attention import document_attention_enabled
from hf_wlb.data import WLBDataCollator
from hf_wlb.parallel.pipeline import ModelParts, check_pipeline
from hf_wlb.parallel.pipeline.stage import as_stage
from tests.numerics.test_families import ACCEPTED, REFUSED, build, documents
from tests.support.oracle import gradients_of, loss_and_gradients, relative_error, worst_error
from tests.support.tolerances import MODEL, MODEL_EXPERTS, NEGATIVE_CONTROL_FACTOR

STAGES = [range(0, 1), range(1, 2)]


def stages_error(model: Any, parts: ModelParts, rows: list[list[int]], handed_on: float = 1.0) -> float:
    """Loss and gradients of packed documents that went through two stages, against the documents alone.

    Args:
        model: In float64.
        parts: Its parts.
        rows: Documents.
        handed_on: The part of the gradient that the last stage gives to the first.
    """
    loss, gradients = loss_and_gradients(model, rows)
    inputs = WLBDataCollator()([{"input_ids": row} for row in rows])
    model.zero_grad()
    with document_attention_enabled(model):
        with as_stage(model, parts, STAGES[0]) as stage:
            hidden = stage.run(lambda given: model(**given), inputs, None)
        received = hidden.detach().requires_grad_()
        with as_stage(model, parts, STAGES[1]) as stage:
            found = stage.run(lambda given: model(**given).loss, inputs, received)
        found.backward()
        assert received.grad is not None
        hidden.backward(received.grad * handed_on)
    return max(relative_error(found, torch.tensor(loss)), worst_error(gradients_of(model), gradients))


@pytest.mark.parametrize("name", ACCEPTED)
def test_two_stages_are_the_model(name: str) -> None:
    family = ACCEPTED[name]
    model = build(family).train()
    parts = check_pipeline(model, STAGES)
    assert model.training and parts.count == 2
    assert bool(parts.tied) == model.config.get_text_config().tie_word_embeddings
    tolerance = MODEL_EXPERTS if family.experts else MODEL
    assert stages_error(model.eval().double(), parts, documents()) <= tolerance


def test_control_half_a_gradient_is_noticed() -> None:
    model = build(ACCEPTED["gemma2"])
    parts = check_pipeline(model, STAGES)
    assert stages_error(model.double(), parts, documents(), handed_on=0.5) > NEGATIVE_CONTROL_FACTOR * MODEL


def test_the_documentation_says_so() -> None:
    text = (Path(__file__).parents[2] / "docs" / "model_families.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")]
    header = next([cell.strip() for cell in line.split("|")] for line in text.splitlines() if "| model type |" in line)
    assert [row[1] for row in rows if row[header.index("pipeline")] != "yes"] == []


# ---- models that are not in Transformers ----


def fake(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = build(ACCEPTED["llama"])
    changed = kind(model.config).eval()
    changed.load_state_dict(model.state_dict(), strict=False)
    return changed


class NormedEmbeddings(LlamaForCausalLM):
    """As Bloom's: a norm between the embeddings and the layers, on the first stage with them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_norm = torch.nn.LayerNorm(config.hidden_size)
        self.model.layers[0].register_forward_pre_hook(self.normed)

    def normed(self, layer: torch.nn.Module, args: Any) -> Any:
        return (self.model.embed_norm(args[0]), *args[1:])


def test_a_norm_of_the_embeddings_is_the_first_stages() -> None:
    model = fake(NormedEmbeddings)
    parts = check_pipeline(model, STAGES)
    assert parts.before == ("model.embed_tokens", "model.embed_norm")
    assert parts.after == ("model.norm", "lm_head")


class LayersGiveTuples(LlamaForCausalLM):
    """As layers did before Transformers 5: something besides the hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_hook(lambda layer, args, output: (output, output.mean()))
        self.model.norm.register_forward_pre_hook(lambda norm, args: (args[0][0],))


class LayersGetMore(LlamaForCausalLM):
    """What one layer made is used by the next, besides the hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_hook(self.keep)
        self.model.layers[1].register_forward_pre_hook(self.give, with_kwargs=True)

    def keep(self, layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self.kept = output.mean()

    def give(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "earlier": self.kept}


class NormBetweenLayers(LlamaForCausalLM):
    """Weights that belong to no layer and work between them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.between = torch.nn.LayerNorm(config.hidden_size)
        self.model.layers[1].register_forward_pre_hook(lambda layer, args: (self.model.between(args[0]), *args[1:]))


class CountsBetweenLayers(LlamaForCausalLM):
    """The same, without a change of the hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.between = torch.nn.LayerNorm(config.hidden_size)
        self.model.layers[1].register_forward_pre_hook(self.look)

    def look(self, layer: torch.nn.Module, args: Any) -> None:
        self.model.between(args[0])


class UnusedWeights(LlamaForCausalLM):
    """Weights that a causal language model does not use."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.pooler = torch.nn.Linear(config.hidden_size, config.hidden_size)


class SecondList(LlamaForCausalLM):
    """Two lists that could be the layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.model.adapters = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in self.model.layers])


class NoList(LlamaForCausalLM):
    """Layers that are no ModuleList."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = torch.nn.Sequential(*self.model.layers)


class ReadsTheHead(LlamaForCausalLM):
    """Its forward looks at the head's weights, on every stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lm_head.weight.dim() == 2
        return super().forward(*args, **kwargs)


class UsesTheEmbeddingTwice(LlamaForCausalLM):
    """The tokens' embeddings matter once more, after the layers."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, **kwargs)
        outputs.logits = outputs.logits + self.model.embed_tokens(input_ids).mean(-1, keepdim=True)
        return outputs


FAKES: list[tuple[type[LlamaForCausalLM], str]] = [
    (LayersGiveTuples, "layer 1 gives a tuple"),
    (LayersGetMore, "layer 1 gets more than hidden states: others that have a gradient"),
    (NormBetweenLayers, "layer 1 does not get the very hidden states that the one before gave"),
    (CountsBetweenLayers, "it has model.between with weights outside of its layers, used between them"),
    (UnusedWeights, "it has model.pooler with weights outside of its layers, which it does not use"),
    (SecondList, r"it has 2 lists of 2 layers \(model.layers, model.adapters\)"),
    (NoList, r"it has no list of 2 layers \(none\)"),
    (ReadsTheHead, r"its own code needs more of other stages' modules than what they hand on \(.*'weight'\)"),
    (UsesTheEmbeddingTwice, "it uses model.embed_tokens both before and after its layers"),
]


@pytest.mark.parametrize(("kind", "reason"), FAKES, ids=[kind.__name__ for kind, _ in FAKES])
def test_refused_with_the_reason(kind: type[LlamaForCausalLM], reason: str) -> None:
    model = fake(kind)
    with pytest.raises(
        ValueError, match=rf"^{kind.__name__} cannot be split into pipeline stages: {reason}.*Set pp_size=1"
    ):
        check_pipeline(model, STAGES)
    assert not model.training
    model(input_ids=torch.tensor([[1, 2, 3]]))  # whole again


@pytest.mark.parametrize("name", ["bloom", "mamba2"])
def test_families_that_are_refused_anyway_are_so_here(name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be split into pipeline stages: .*Set pp_size=1 for this model"):
        check_pipeline(build(REFUSED[name][0]), STAGES)
