"""Attention by documents against a dense oracle, and what the function that Transformers calls refuses."""

from itertools import accumulate
from typing import Any

import pytest
import torch

from hf_wlb.attention import attend_documents, document_attention_enabled, register
from hf_wlb.attention.reference import BLOCK
from hf_wlb.attention.registration import wlb_attention
from hf_wlb.data import WLBDataCollator
from tests.support.oracle import dense_attention, relative_error
from tests.support.tiny_llama import random_documents, tiny_llama
from tests.support.tolerances import ATTENTION_FLOAT32, ATTENTION_FLOAT64, NEGATIVE_CONTROL_FACTOR

LENGTHS = (1, 7, 137, 2, 1, 300, 2)
assert max(LENGTHS) > BLOCK


def bounds_of(lengths: tuple[int, ...]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def tensors(lengths=LENGTHS, heads=4, kv_heads=2, size=8, value_size=None, sinks=False) -> dict[str, torch.Tensor]:
    """Random float64 inputs, and in ``weights`` the output's weights in a scalar loss."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    tokens, value_size = sum(lengths), value_size or size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {
        "query": random(1, heads, tokens, size),
        "key": random(1, kv_heads, tokens, size),
        "value": random(1, kv_heads, tokens, value_size),
        "weights": random(1, heads, tokens, value_size),
    }
    return {**made, "sinks": random(heads)} if sinks else made


def outcome(attend: Any, inputs: dict[str, torch.Tensor], bounds: list[int], dtype: torch.dtype, **options: Any):
    """Output and gradients, by name."""
    leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in inputs.items() if name != "weights"}
    output = attend(boundaries=bounds, **leaves, **options)
    (output * inputs["weights"].to(dtype)).sum().backward()
    return {"output": output, **{f"d {name}": leaf.grad for name, leaf in leaves.items()}}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(relative_error(found[name], expected[name]) for name in expected)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one head a group": ({"kv_heads": 4}, {}),
    "gqa 8 to 1": ({"heads": 8, "kv_heads": 1}, {}),
    "scaling": ({}, {"scaling": 0.11}),
    "window 1": ({}, {"sliding_window": 1}),
    "window 6": ({}, {"sliding_window": 6}),
    "window as long as a document": ({}, {"sliding_window": 137}),
    "window over a block": ({}, {"sliding_window": BLOCK + 3}),
    "window beyond every document": ({}, {"sliding_window": 1000}),
    "softcap": ({}, {"softcap": 1.5}),
    "sinks": ({"sinks": True}, {}),
    "value size": ({"value_size": 5}, {}),
    "all but sinks": ({"heads": 8, "kv_heads": 1, "value_size": 12}, {"sliding_window": 9, "softcap": 2.0}),
    "everything": (
        {"heads": 8, "kv_heads": 1, "value_size": 12, "sinks": True},
        {"sliding_window": 70, "softcap": 2.0, "scaling": 0.3},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_equal_the_dense_oracle(case: str) -> None:
    shape, options = CASES[case]
    inputs, bounds = tensors(**shape), bounds_of(LENGTHS)
    expected = outcome(dense_attention, inputs, bounds, torch.float64, **options)
    assert error(outcome(attend_documents, inputs, bounds, torch.float32, **options), expected) <= ATTENTION_FLOAT32
    assert error(outcome(attend_documents, inputs, bounds, torch.float64, **options), expected) <= ATTENTION_FLOAT64


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_one_document_of_an_edge_length_in_blocks(length: int) -> None:
    inputs, bounds, options = tensors((length,), sinks=True), [0, length], {"sliding_window": 100}
    expected = outcome(dense_attention, inputs, bounds, torch.float64, **options)
    assert error(outcome(attend_documents, inputs, bounds, torch.float32, **options), expected) <= ATTENTION_FLOAT32


WRONG: dict[str, tuple[dict[str, Any], list[int], dict[str, Any], dict[str, Any]]] = {
    "a boundary one token late": ({}, bounds_of((1, 8, 136, 2, 1, 300, 2)), {}, {}),
    "no mask between documents": ({}, [0, sum(LENGTHS)], {}, {}),
    "window one too long": ({}, bounds_of(LENGTHS), {"sliding_window": 6}, {"sliding_window": 7}),
    "window one too short": ({}, bounds_of(LENGTHS), {"sliding_window": 6}, {"sliding_window": 5}),
    "a window that hides one token": ({}, bounds_of(LENGTHS), {"sliding_window": 300}, {"sliding_window": 299}),
    "no softcap": ({}, bounds_of(LENGTHS), {"softcap": 1.5}, {}),
    "no scaling": ({}, bounds_of(LENGTHS), {"scaling": 0.11}, {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_check_notices(case: str) -> None:
    shape, bounds, right, wrong = WRONG[case]
    inputs = tensors(**shape)
    expected = outcome(dense_attention, inputs, bounds_of(LENGTHS), torch.float64, **right)
    found = outcome(attend_documents, inputs, bounds, torch.float32, **wrong)
    assert error(found, expected) > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT32


def test_the_check_notices_forgotten_sinks() -> None:
    inputs, bounds = tensors(sinks=True), bounds_of(LENGTHS)
    expected = dense_attention(**{n: t for n, t in inputs.items() if n != "weights"}, boundaries=bounds)
    found = attend_documents(inputs["query"], inputs["key"], inputs["value"], bounds)
    assert relative_error(found, expected) > NEGATIVE_CONTROL_FACTOR * ATTENTION_FLOAT32


def test_changing_a_document_leaves_the_others_as_they_were() -> None:
    inputs, bounds = tensors(), bounds_of(LENGTHS)
    arguments = {name: inputs[name].float() for name in ("query", "key", "value")}
    before = attend_documents(**arguments, boundaries=bounds)
    for tensor in arguments.values():
        tensor[:, :, bounds[2] : bounds[3]] += 1
    after = attend_documents(**arguments, boundaries=bounds)
    assert not torch.equal(after[:, :, bounds[2] : bounds[3]], before[:, :, bounds[2] : bounds[3]])
    for first, last in ((0, bounds[2]), (bounds[3], bounds[-1])):
        assert torch.equal(after[:, :, first:last], before[:, :, first:last])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 3.0}])
def test_half_precision_stays_near(options: dict[str, Any]) -> None:
    inputs, bounds = tensors(), bounds_of(LENGTHS)
    arguments = {name: inputs[name] for name in ("query", "key", "value")}
    expected = dense_attention(**arguments, boundaries=bounds, **options)
    found = attend_documents(**{n: t.bfloat16() for n, t in arguments.items()}, boundaries=bounds, **options)
    assert found.dtype is torch.bfloat16
    assert relative_error(found, expected) < 2e-2


# ---- the function that Transformers calls ----


class Layer(torch.nn.Module):
    is_causal = True


def call(tokens: int = 5, rows: int = 1, layer: torch.nn.Module | None = None, **options: Any) -> torch.Tensor:
    q, kv = torch.ones(rows, 4, tokens, 8), torch.ones(rows, 2, tokens, 8)
    arguments = {"cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32), **options}
    return wlb_attention(layer or Layer(), q, kv, kv, arguments.pop("attention_mask", None), **arguments)[0]


def test_output_is_tokens_before_heads() -> None:
    output = call()
    assert output.shape == (1, 5, 4, 8) and output.is_contiguous()


NOT_CAUSAL = Layer()
NOT_CAUSAL.is_causal = False
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": ({"cu_seq_lens_q": None}, "Layer got no cu_seq_lens_q.*Feed the model what WLBDataCollator gives"),
    "padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "attention_mask that hides tokens.*no padding"),
    "rows": ({"rows": 2}, "a packed micro-batch is one row, but Layer got 2 rows"),
    "dropout": ({"dropout": 0.1}, r"attention dropout \(0.1\) is not supported"),
    "bias": ({"position_bias": torch.zeros(1)}, "Layer passes position_bias"),
    "head mask": ({"head_mask": torch.zeros(1)}, "Layer passes head_mask"),
    "not causal": ({"is_causal": False}, "attention that is not causal"),
    "layer not causal": ({"layer": NOT_CAUSAL}, "attention that is not causal"),
    "short plan": ({"tokens": 6}, "must run from 0 to the micro-batch's 6 tokens, got 0 to 5"),
    "long plan": ({"tokens": 4}, "must run from 0 to the micro-batch's 4 tokens, got 0 to 5"),
    "late plan": ({"cu_seq_lens_q": torch.tensor([2, 5])}, "must run from 0 .* got 2 to 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    options, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        call(**options)


def test_an_all_ones_mask_keeps_documents_apart_and_a_padding_mask_is_refused() -> None:
    model = tiny_llama()
    documents = random_documents([5, 9])
    changed = [[7] * 5, documents[1]]
    with document_attention_enabled(model), torch.no_grad():
        first, second = (
            model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).logits
            for batch in (WLBDataCollator()([{"input_ids": d} for d in pair]) for pair in (documents, changed))
        )
        without = model(**WLBDataCollator()([{"input_ids": d} for d in documents])).logits
        mask = torch.ones(1, 14, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="hides tokens"):
            model(**WLBDataCollator()([{"input_ids": d} for d in documents]), attention_mask=mask)
        with pytest.raises(ValueError, match="got no cu_seq_lens_q"):
            model(input_ids=torch.tensor([documents[0]]))
    assert torch.equal(first, without)
    assert torch.equal(first[:, 5:], second[:, 5:]) and not torch.equal(first[:, :5], second[:, :5])


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_implementation_comes_back_also_after_an_exception(before: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(before)
    register()
    register()  # as often as one likes
    with document_attention_enabled(model):
        assert model.config._attn_implementation == "wlb"
    with pytest.raises(RuntimeError, match="stop"), document_attention_enabled(model):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))  # which 'wlb' would refuse
