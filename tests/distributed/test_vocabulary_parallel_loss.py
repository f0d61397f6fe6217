"""The loss without whole logits on several ranks: a split vocabulary, DDP and FSDP2."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_wlb.loss import HeadLoss, linear_cross_entropy
from hf_wlb.parallel.vocabulary import VocabularyGroup
from tests.numerics.test_loss_chunked import UNCOMPILED, Case, expected_of, inputs_of, worst
from tests.numerics.test_loss_chunked import loss_and_gradients as loss_and_gradients_of
from tests.numerics.test_loss_head import error, loss_and_gradients, micro_batch, model_of
from tests.support.oracle import gradients_of
from tests.support.spawn import run_distributed
from tests.support.tolerances import HEAD_LOSS_FLOAT32, LOSS_FLOAT32, NEGATIVE_CONTROL_FACTOR

CASES = {
    "plain": Case(vocabulary=30),
    "one token": Case(tokens=1, vocabulary=30),
    "bias": Case(vocabulary=30, bias=True),
    "softcap": Case(vocabulary=30, softcap=1.5),
    "smoothing": Case(vocabulary=30, smoothing=0.1),
    "all together": Case(vocabulary=30, bias=True, softcap=1.5, smoothing=0.3),
}


class _Alone(VocabularyGroup):
    """The control: a rank that does not ask the others."""

    def max_(self, tensor: torch.Tensor) -> None:
        pass

    def sum_(self, tensor: torch.Tensor) -> None:
        pass


def split_vocabulary(rank: int, world_size: int) -> dict[str, float]:
    """Each rank's rows against those of whole logits in float64."""
    found = {}
    for name, case in {**CASES, "control": CASES["plain"], "far logits": CASES["plain"]}.items():
        given = inputs_of(case)
        if name == "far logits":
            given["hidden"] = (given["hidden"].detach() * 300).requires_grad_()
        options = {"softcap": case.softcap, "label_smoothing": case.smoothing}
        expected = expected_of(given, **options)
        expected[2:] = [gradient.chunk(world_size)[rank] for gradient in expected[2:]]
        for part in ("weight", "bias"):
            if given[part] is not None:
                given[part] = given[part].detach().chunk(world_size)[rank].requires_grad_()
        vocabulary = (_Alone if name == "control" else VocabularyGroup)(None, case.vocabulary)
        options |= {"chunk_tokens": case.chunk, "vocabulary": vocabulary}
        for pieces in (None, UNCOMPILED):
            loss = loss_and_gradients_of(linear_cross_entropy, given, pieces=pieces, **options)
            found[name if pieces is None else f"{name}, pieces"] = worst(loss, expected)
    return found


def split_head(rank: int, world_size: int) -> float:
    """A model whose head holds this rank's rows; everything else has its whole gradient on every rank."""
    model, given = model_of("gemma2"), micro_batch()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # not tied
    expected = loss_and_gradients(model, given)
    rows = model.lm_head.weight.detach().chunk(world_size)[rank].clone()
    expected[1]["lm_head.weight"] = expected[1]["lm_head.weight"].chunk(world_size)[rank]
    model.lm_head.weight = torch.nn.Parameter(rows)
    vocabulary = VocabularyGroup(None, model.config.vocab_size)
    with HeadLoss(model, label_smoothing=0.0, vocabulary=vocabulary).enabled():
        return error(loss_and_gradients(model, given), expected)


def wrapped(rank: int, world_size: int) -> dict[str, float]:
    """Tied models, another micro-batch on every rank, gradients averaged."""
    found = {}
    micro_batches = [micro_batch(tokens) for tokens in (23, 12)]
    for kind in ("ddp", "fsdp2", "fsdp2, hook set up before"):
        model = model_of("llama, attention bias")
        single = copy.deepcopy(model)
        losses = [single(**given).loss for given in micro_batches]
        (sum(losses) / world_size).backward()
        expected = (losses[rank].detach(), gradients_of(single))
        head_loss = HeadLoss(model) if kind.endswith("before") else None
        runs: Any = model
        if kind == "ddp":
            runs = DistributedDataParallel(model)
        else:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        with (head_loss or HeadLoss(model)).enabled():
            output = runs(**micro_batches[rank])
        output.loss.backward()
        assert output.logits is None
        gradients = {
            name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            for name, gradient in gradients_of(model).items()
        }
        found[kind] = error((output.loss.detach(), gradients), expected)
    return found


def refusal(rank: int, world_size: int) -> list[str]:
    sentences = []
    try:
        VocabularyGroup(None, 31)
    except ValueError as refused:
        sentences.append(str(refused))
    model = model_of("llama")
    fully_shard(model.model)  # and the root not
    model.lm_head.weight = torch.nn.Parameter(
        dist.tensor.distribute_tensor(model.lm_head.weight.detach(), dist.init_device_mesh("cpu", (world_size,)))
    )
    try:
        with HeadLoss(model).enabled():
            model(**micro_batch())
    except RuntimeError as refused:
        sentences.append(str(refused))
    return sentences


def everything(rank: int, world_size: int) -> tuple[Any, ...]:
    return (
        split_vocabulary(rank, world_size),
        split_head(rank, world_size),
        wrapped(rank, world_size),
        refusal(rank, world_size),
    )


def test_the_loss_on_two_ranks() -> None:
    for vocabulary, head, wrappers, sentences in run_distributed(everything, 2, timeout_s=400):
        for pieces in ("", ", pieces"):
            assert vocabulary.pop(f"far logits{pieces}") <= 10 * LOSS_FLOAT32  # float32 logits of a thousand
            assert vocabulary.pop(f"control{pieces}") > NEGATIVE_CONTROL_FACTOR * LOSS_FLOAT32
        assert len(vocabulary) == 2 * len(CASES) and max(vocabulary.values()) <= LOSS_FLOAT32, vocabulary
        assert head <= HEAD_LOSS_FLOAT32
        assert len(wrappers) == 3 and max(wrappers.values()) <= HEAD_LOSS_FLOAT32, wrappers
        assert "a vocabulary of 31 rows cannot be split over 2 ranks" in sentences[0]
        assert "the head's weight is a DTensor when the loss is computed" in sentences[1]
