"""Refusing models that would treat packed or sharded documents otherwise than documents alone.

A look at the configuration, then a few forward passes over a few tokens with a listening attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from hf_wlb.attention.context import AttentionContext, ShardTensors
from hf_wlb.attention.function import kernel_request
from hf_wlb.attention.kernels import AttentionOptions, KernelRequest, ReferenceKernel
from hf_wlb.attention.registration import document_attention_enabled, wlb_attention

_LISTENING = "wlb_check"
_PROBE = [1, 2, 1, 2, 1]  # the document that is looked at

#: Layer types whose attention is fully described by the arguments that the attention interface passes.
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class LayerAttention:
    """What one attention layer asks of whatever attends.

    Attributes:
        request: Of a kernel, for the model's own type and device.
        heads: Of queries.
        kv_heads: Of keys and values.
    """

    request: KernelRequest
    heads: int
    kv_heads: int

    @property
    def shape(self) -> str:
        """Heads and their sizes, in words."""
        sizes = (self.request.head_size, self.request.value_head_size)
        return f"{self.heads} heads and {self.kv_heads} KV heads of sizes {sizes[0]} and {sizes[1]}"


@dataclass(frozen=True)
class _Heard:
    """One call of the attention function: whether the plan came, and what it was asked for."""

    documents: bool
    shard: bool
    layer: LayerAttention


def check_isolation(model: PreTrainedModel, layers: int | None = None) -> list[LayerAttention]:
    """Refuses a model that would treat packed documents otherwise than documents alone.

    Looks at the configuration, then runs three forward passes over a few tokens: every attention layer must get the
    plan, for whole documents and for context parallelism, and the sliding window, if there is one; changing a document
    must leave the logits of the next one as they were, and these must be those of that document alone.

    Args:
        model: Whole, or one stage of a pipeline.
        layers: How many of its layers are there; all by default.

    Returns:
        What its attention layers ask, in their order.

    Raises:
        ValueError: With the reason, naming the model class.
    """
    name = type(model).__name__
    _check_config(model, name)
    (calls, packed), (_, changed) = (_forward(model, [[token] * 3, _PROBE]) for token in (1, 2))
    _check_calls(model, calls, name, layers)
    packed, changed, alone = packed[3:], changed[3:], _forward(model, [_PROBE])[1]
    # Experts see another mix of tokens in the passes and may round differently; a leak is far larger.
    if (packed - changed).abs().max() > 1e-3 * packed.abs().max().clamp(min=1e-6):
        raise ValueError(
            f"changing one document changes the logits of another one packed with it in {name}: some layer mixes "
            "tokens of different documents (a convolution, a recurrent or a chunked layer?). This model family is "
            "not supported."
        )
    # Positions that are off change every token; rounding in half precision stays below, and spares some token.
    if ((packed - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-6)).min() > 0.05:
        raise ValueError(
            f"a document packed behind another one gets other logits than alone in {name}: the model numbers positions "
            "by itself and not by position_ids from 0. This model family is not supported."
        )
    return [call.layer for call in calls]


def _check_calls(model: PreTrainedModel, calls: Sequence[_Heard], name: str, there: int | None) -> None:
    config = model.config.get_text_config()
    layers = int(config.num_hidden_layers) if there is None else there
    for argument, given in (
        ("cu_seq_lens_q", sum(call.documents for call in calls)),
        ("wlb_shard and wlb_context", sum(call.shard for call in calls)),
    ):
        if len(calls) < layers or given < len(calls):
            raise ValueError(
                f"{name} does not hand {argument} on to every attention layer ({given} of {layers} got it), so "
                "documents packed together would attend to each other. This model family is not supported."
            )
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds if kinds else window is not None
    if windowed and there is None and not any(call.layer.request.sliding_window for call in calls):
        raise ValueError(
            f"{name} has sliding_window={window} but no layer hands it to the attention function, so the window would "
            "not be kept. Set config.sliding_window = None if the model is to be trained without it."
        )


def _check_config(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    unsupported = sorted(set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES)
    if unsupported:
        raise ValueError(
            f"{name} has layers of type {', '.join(unsupported)}; packed documents are supported for "
            f"{' and '.join(sorted(SUPPORTED_LAYER_TYPES))} only"
        )
    for attribute in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, attribute, 0):
            raise ValueError(
                f"{name} has {attribute}={getattr(config, attribute)}; attention dropout is not supported with packed "
                f"documents. Set config.{attribute} = 0 before the model is built."
            )
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in rotary:
        raise ValueError(
            f"{name} uses three-dimensional position ids (mrope_section in its rotary settings), which packed "
            "documents do not have; train its text model with ordinary rotary positions"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not use Transformers' attention interface, so its documents cannot be isolated")


def _forward(model: PreTrainedModel, documents: list[list[int]]) -> tuple[list[_Heard], torch.Tensor]:
    """Packs documents; tells of every attention call what came, and the logits [tokens, ...].

    A single document goes without position_ids, as the model would be called for it alone.
    """
    bounds = torch.tensor([0, *accumulate(map(len, documents))], dtype=torch.int32, device=model.device)
    tokens = [token for document in documents for token in document]
    positions = [position for document in documents for position in range(len(document))]
    longest = max(map(len, documents))
    plan = ShardTensors.whole(bounds, longest, len(tokens))
    context = AttentionContext(kernel=ReferenceKernel())
    calls: list[_Heard] = []

    def listening(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        options = AttentionOptions(1.0, kwargs.get("sliding_window"), kwargs.get("softcap"))
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        shard = kwargs.get("wlb_shard") is plan and kwargs.get("wlb_context") is context
        documents = kwargs.get("cu_seq_lens_q") is not None
        layer = LayerAttention(kernel_request(q, k, v, options), q.shape[1], k.shape[1])
        calls.append(_Heard(documents, shard, layer))
        kwargs |= {"wlb_shard": plan, "wlb_context": context}
        return wlb_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_LISTENING, listening)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), document_attention_enabled(model, _LISTENING):
            output = model(
                input_ids=torch.tensor([tokens], device=model.device),
                position_ids=torch.tensor([positions], device=model.device) if len(documents) > 1 else None,
                cu_seq_lens_q=bounds,
                cu_seq_lens_k=bounds,
                max_length_q=longest,
                max_length_k=longest,
                wlb_shard=plan,
                wlb_context=context,
                use_cache=False,
            )
        return calls, output.logits[0].float()
    finally:
        model.train(training)
