"""``attn_implementation="wlb"``: document attention inside unmodified Transformers models.

The plan of a micro-batch (where documents begin) travels as keyword arguments of the model's forward, as for
FlashAttention: ``cu_seq_lens_q``. Models that drop it, or that do not use Transformers' attention interface at all,
would silently attend across documents; ``check_isolation`` finds them out before training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from hf_wlb.attention.reference import attend_documents

IMPLEMENTATION = "wlb"
_LISTENING = "wlb_check"  # the same, while check_isolation listens

_PROBE = [1, 2, 1, 2, 1]  # the document that check_isolation looks at

#: Layer types whose attention is fully described by the arguments that the attention interface passes.
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def wlb_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Transformers calls.

    Args:
        module: The attention layer, for error messages.
        query: [1, heads, tokens, head size].
        key: [1, KV heads, tokens, head size].
        value: [1, KV heads, tokens, value head size].
        attention_mask: Must hide nothing.
        scaling: Factor on the scores.
        dropout: Must be 0.
        sliding_window: Tokens that a query sees, itself included.
        softcap: See ``attend_documents``.
        s_aux: [heads], attention sinks.
        cu_seq_lens_q: int32 [documents + 1], first token of every document and the number of tokens.
        **kwargs: What else the model passes on; refused where it would change the result.

    Returns:
        [1, tokens, heads, value head size], and None for the attention weights.

    Raises:
        ValueError: No plan, a padding mask, several rows, dropout or a bias: whatever would give a wrong result.
    """
    name = type(module).__name__
    if cu_seq_lens_q is None:
        raise ValueError(
            f"{name} got no cu_seq_lens_q, so attn_implementation='wlb' cannot tell the documents of the micro-batch "
            "apart. Feed the model what WLBDataCollator gives; for generation switch back with "
            "model.set_attn_implementation('sdpa')."
        )
    if attention_mask is not None:
        raise ValueError(
            f"{name} got an attention_mask that hides tokens. Packed micro-batches have no padding: drop the mask and "
            "tokenise without padding, or use attn_implementation='sdpa' for padded batches."
        )
    if query.shape[0] != 1:
        raise ValueError(f"a packed micro-batch is one row, but {name} got {query.shape[0]} rows")
    if dropout:
        raise ValueError(f"attention dropout ({dropout}) is not supported with packed documents; set it to 0")
    for unsupported in ("position_bias", "head_mask"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{name} passes {unsupported}, which attn_implementation='wlb' does not support")
    if not (kwargs.get("is_causal", True) in (True, None) and getattr(module, "is_causal", True)):
        raise ValueError(f"{name} asks for attention that is not causal, which attn_implementation='wlb' is not")
    boundaries = cu_seq_lens_q.tolist()
    if boundaries[0] != 0 or boundaries[-1] != query.shape[2]:
        raise ValueError(
            f"cu_seq_lens_q must run from 0 to the micro-batch's {query.shape[2]} tokens, got {boundaries[0]} to "
            f"{boundaries[-1]}"
        )
    output = attend_documents(
        query, key, value, boundaries, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes ``attn_implementation="wlb"`` known to Transformers. May be called any number of times."""
    AttentionInterface.register(IMPLEMENTATION, wlb_attention)
    # Reduces an all-ones padding mask to None and hands any other mask on, for wlb_attention to refuse.
    AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)


@contextlib.contextmanager
def document_attention_enabled(model: PreTrainedModel, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """Uses document attention inside the block and the model's own implementation after it."""
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_isolation(model: PreTrainedModel) -> None:
    """Refuses a model that would treat packed documents otherwise than documents alone.

    Looks at the configuration, then runs three forward passes over a few tokens: every attention layer must get the
    plan (and the sliding window, if there is one), changing a document must leave the logits of the next one as they
    were, and these must be those of that document alone.

    Raises:
        ValueError: With the reason, naming the model class.
    """
    name = type(model).__name__
    _check_config(model, name)
    (calls, packed), (_, changed) = (_forward(model, [[token] * 3, _PROBE]) for token in (1, 2))
    _check_calls(model, calls, name)
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


def _check_calls(model: PreTrainedModel, calls: list[tuple[bool, bool]], name: str) -> None:
    """``calls``: for every call of the attention function, whether it got the plan and a sliding window."""
    config = model.config.get_text_config()
    layers, given = int(config.num_hidden_layers), sum(plan for plan, _ in calls)
    if len(calls) < layers or given < len(calls):
        raise ValueError(
            f"{name} does not hand cu_seq_lens_q on to every attention layer ({given} of {layers} got it), so "
            "documents packed together would attend to each other. This model family is not supported."
        )
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds if kinds else window is not None
    if windowed and not any(window for _, window in calls):
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
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not use Transformers' attention interface, so its documents cannot be isolated")


def _forward(model: PreTrainedModel, documents: list[list[int]]) -> tuple[list[tuple[bool, bool]], torch.Tensor]:
    """Packs documents; tells of every attention call whether plan and window came, and the logits [tokens, ...].

    A single document goes without position_ids, as the model would be called for it alone.
    """
    bounds = torch.tensor([0, *accumulate(map(len, documents))], dtype=torch.int32, device=model.device)
    tokens = [token for document in documents for token in document]
    positions = [position for document in documents for position in range(len(document))]
    calls: list[tuple[bool, bool]] = []

    def listening(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        calls.append((kwargs.get("cu_seq_lens_q") is not None, kwargs.get("sliding_window") is not None))
        return wlb_attention(module, query, *args, **{**kwargs, "cu_seq_lens_q": bounds})

    AttentionInterface.register(_LISTENING, listening)
    AttentionMaskInterface.register(_LISTENING, flash_attention_mask)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), document_attention_enabled(model, _LISTENING):
            output = model(
                input_ids=torch.tensor([tokens], device=model.device),
                position_ids=torch.tensor([positions], device=model.device) if len(documents) > 1 else None,
                cu_seq_lens_q=bounds,
                cu_seq_lens_k=bounds,
                max_length_q=max(map(len, documents)),
                max_length_k=max(map(len, documents)),
                use_cache=False,
            )
        return calls, output.logits[0].float()
    finally:
        model.train(training)
