"""The function that Transformers calls: what it gives and what it refuses."""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_wlb.attention import AttentionContext, ShardTensors, document_attention_enabled, register
from hf_wlb.attention.kernels import ReferenceKernel
from hf_wlb.attention.registration import MASKLESS, wlb_attention
from hf_wlb.data import WLBDataCollator
from tests.support.oracle import dense_attention, relative_error
from tests.support.tiny_llama import random_documents, tiny_llama
from tests.support.tolerances import ATTENTION_FLOAT32


class Layer(torch.nn.Module):
    is_causal = True


def call(tokens: int = 5, rows: int = 1, layer: torch.nn.Module | None = None, **options: Any) -> torch.Tensor:
    q, kv = torch.ones(rows, 4, tokens, 8), torch.ones(rows, 2, tokens, 8)
    arguments = {"cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32), **options}
    return wlb_attention(layer or Layer(), q, kv, kv, arguments.pop("attention_mask", None), **arguments)[0]


def test_output_is_tokens_before_heads() -> None:
    output = call()
    assert output.shape == (1, 5, 4, 8) and output.is_contiguous()


def test_every_argument_reaches_the_scores() -> None:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, size, generator=made) for heads, size in ((4, 8), (2, 8), (2, 12)))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    options = {"scaling": 0.3, "sliding_window": 2, "softcap": 1.5}
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    found = wlb_attention(Layer(), q, k, v, None, s_aux=sinks, cu_seq_lens_q=bounds, **options)[0]
    expected = dense_attention(*(t.double() for t in (q, k, v)), [0, 4, 9], sinks=sinks.double(), **options)
    assert relative_error(found, expected.transpose(1, 2)) <= ATTENTION_FLOAT32


def test_autocast_and_mixed_types_meet_in_one() -> None:
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    q, kv = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    assert wlb_attention(Layer(), q, kv, kv.bfloat16(), None, cu_seq_lens_q=bounds)[0].dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert wlb_attention(Layer(), q, kv, kv.bfloat16(), None, cu_seq_lens_q=bounds)[0].dtype is torch.bfloat16


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
    "longest too short": ({"max_length_q": 2}, "max_length_q is 2, but cu_seq_lens_q holds a document of 3 tokens"),
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
        with pytest.raises(ValueError, match="hides tokens"):
            model(torch.tensor([documents[0]]), mask[:, :5])
        with pytest.raises(ValueError, match="LlamaForCausalLM got an attention_mask"):
            model(**WLBDataCollator()([{"input_ids": d} for d in documents]), attention_mask=torch.ones(1, 1, 14, 14))
        with pytest.raises(ValueError, match="got no cu_seq_lens_q"):
            model(torch.tensor([documents[0]]), torch.ones(1, 5))
    assert torch.equal(first, without)
    assert torch.equal(first[:, 5:], second[:, 5:]) and not torch.equal(first[:, :5], second[:, :5])


def packed_forward(model: Any, way: str, batch: dict[str, Any], mask: torch.Tensor) -> Any:
    given = dict(batch)
    ids = given.pop("input_ids")
    if way == "forward without hooks":
        return model.forward(input_ids=ids, attention_mask=mask, **given)
    if way == "positions":
        return model(ids, mask, **given)
    if way == "a forward of any arguments":
        own = model.forward
        model.forward = lambda *args, **kwargs: own(*args, **kwargs)
        return model(ids, mask, **given)
    return model.get_decoder()(input_ids=ids, attention_mask=mask, **given)


@pytest.mark.parametrize("way", ["forward without hooks", "positions", "a forward of any arguments", "decoder"])
def test_a_padding_mask_is_refused_in_whatever_way_it_comes(way: str) -> None:
    """Transformers makes no mask inside, so that one which slips through would be ignored."""
    model, batch = tiny_llama(), WLBDataCollator()([{"input_ids": d} for d in random_documents([5, 9])])
    mask = torch.ones(1, 14, dtype=torch.long)
    with document_attention_enabled(model), torch.no_grad():
        packed_forward(model, way, batch, mask)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="LlamaForCausalLM got an attention_mask that hides tokens"):
            packed_forward(tiny_in(model), way, batch, mask)


def tiny_in(model: Any) -> Any:
    """The model with the forward of its class."""
    vars(model).pop("forward", None)
    return model


def test_padded_prompts_generate_once_the_implementation_is_switched() -> None:
    model = tiny_llama()
    prompts = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    options = {"attention_mask": (prompts > 0).long(), "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompts, **options)
    with document_attention_enabled(model):
        with pytest.raises(ValueError, match="attention_mask that hides tokens"):
            model.generate(prompts, **options)
        copied = copy.deepcopy(model)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model.generate(prompts, **options), expected)
    assert not model._forward_pre_hooks and not model.base_model._forward_pre_hooks
    copied.set_attn_implementation("sdpa")
    assert torch.equal(copied.generate(prompts, **options), expected)


def test_a_model_of_its_own_reduces_an_all_ones_mask_and_refuses_padding() -> None:
    """As ``from_pretrained(attn_implementation="wlb")`` gives it, without the trainer."""
    register()
    model = tiny_llama()
    model.set_attn_implementation("wlb")
    batch = WLBDataCollator()([{"input_ids": d} for d in random_documents([5, 9])])
    mask = torch.ones(1, 14, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(model(**batch, attention_mask=mask).logits, model(**batch).logits)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="hides tokens"):
            model(**batch, attention_mask=mask)


class Readings(TorchDispatchMode):
    """Counts how often the host asks a device for a number, for which it waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_a_planned_forward_pass_reads_nothing_back_from_the_device() -> None:
    model = tiny_llama()
    batch = WLBDataCollator()([{"input_ids": d} for d in random_documents([5, 9])])
    batch["wlb_shard"] = ShardTensors.whole(batch["cu_seq_lens_q"], 9, 14)
    batch["wlb_context"] = AttentionContext(kernel=ReferenceKernel())
    with document_attention_enabled(model), Readings() as readings:
        model(**batch).logits.sum().backward()
    assert readings.count == 0
    model.set_attn_implementation("wlb")  # where Transformers looks at the position ids
    with Readings() as readings:
        model(**batch)
    assert readings.count > 0


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_implementation_comes_back_also_after_an_exception(before: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(before)
    register()
    register()  # as often as one likes
    with document_attention_enabled(model):
        assert model.config._attn_implementation == MASKLESS
    with pytest.raises(RuntimeError, match="stop"), document_attention_enabled(model):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))  # which 'wlb' would refuse
