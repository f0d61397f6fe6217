"""``attn_implementation="wlb"``: document attention inside unmodified Transformers models.

The plan of a micro-batch travels as keyword arguments of the model's forward: ``cu_seq_lens_q`` as for FlashAttention
where documents are whole, ``wlb_shard`` and ``wlb_context`` under context parallelism. Models that drop it, or that do
not use Transformers' attention interface at all, would silently attend across documents; ``hf_wlb.attention.isolation``
finds them out before training.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from hf_wlb.attention.context import AttentionContext, ShardTensors
from hf_wlb.attention.function import attend
from hf_wlb.attention.kernels import AttentionOptions

IMPLEMENTATION = "wlb"
# The same function, but Transformers makes no masks: to make them it reads position ids back from the device in every
# forward pass. ``document_attention_enabled`` refuses masks in its place.
MASKLESS = "wlb_maskless"

_document_attention = {IMPLEMENTATION, MASKLESS}  # names under which documents are kept apart
# What models inside ``document_attention_enabled``, and their decoders, attend with elsewhere.
_own: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

_OTHER_INPUTS = (
    "To generate, or to call the model on other inputs than packed ones, as in a callback: `with "
    "hf_wlb.plain_attention(model): model.generate(...)`, which switches to the model's own attention and back."
)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _opaque(function: _Function) -> _Function:
    """Keeps ``torch.compile`` out: the plan is another one every time, and ranks exchange tensors inside."""
    return cast(_Function, torch.compiler.disable(function))


@_opaque
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
    max_length_q: int | None = None,
    wlb_shard: ShardTensors | None = None,
    wlb_context: AttentionContext | None = None,
    wlb_info: object = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Transformers calls. A compiled model calls it too, but does not look inside.

    Args:
        module: The attention layer, for error messages.
        query: [1, heads, tokens, head size].
        key: [1, KV heads, tokens, head size].
        value: [1, KV heads, tokens, value head size].
        attention_mask: Must hide nothing.
        scaling: Factor on the scores; default head size ** -0.5.
        dropout: Must be 0.
        sliding_window: Tokens that a query sees, itself included.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        s_aux: [heads], attention sinks.
        cu_seq_lens_q: int32 [documents + 1], first token of every document and the number of tokens; the plan where
            documents are whole on this process. Read back from a GPU in every layer, unless ``wlb_shard`` comes.
        max_length_q: Tokens of the longest document.
        wlb_shard: The plan under context parallelism, or of whole documents.
        wlb_context: How to attend; by default with the fastest kernel, alone.
        wlb_info: Not looked at: what the collator tells whoever trains, in case it comes along.
        **kwargs: What else the model passes on; refused where it would change the result.

    Returns:
        [1, tokens, heads, value head size], and None for the attention weights.

    Raises:
        ValueError: No plan or one that does not fit, a padding mask, several rows, dropout or a bias: whatever would
            give a wrong result.
    """
    name = type(module).__name__
    _check_call(module, query, attention_mask, dropout, kwargs)
    context = wlb_context or _ALONE
    if wlb_shard is None:
        wlb_shard = _whole_documents(name, cu_seq_lens_q, max_length_q, query.shape[2])
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        deterministic=context.deterministic,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _of_one_type(query, key, value))
    return attend(q, k, v, wlb_shard, context, options, s_aux)[None], None


_ALONE = AttentionContext()


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(_hides_tokens(name))
    if query.shape[0] != 1:
        raise ValueError(f"a packed micro-batch is one row, but {name} got {query.shape[0]} rows. {_OTHER_INPUTS}")
    if dropout:
        raise ValueError(f"attention dropout ({dropout}) is not supported with packed documents; set it to 0")
    for unsupported in ("position_bias", "head_mask"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{name} passes {unsupported}, which attn_implementation='wlb' does not support")
    if not (kwargs.get("is_causal", True) in (True, None) and getattr(module, "is_causal", True)):
        raise ValueError(f"{name} asks for attention that is not causal, which attn_implementation='wlb' is not")


def _hides_tokens(name: str) -> str:
    return (
        f"{name} got an attention_mask that hides tokens. Packed micro-batches have no padding: drop the mask and "
        f"tokenise without padding. {_OTHER_INPUTS}"
    )


def _whole_documents(name: str, cu_seq_lens: torch.Tensor | None, max_length: int | None, tokens: int) -> ShardTensors:
    if cu_seq_lens is None:
        raise ValueError(
            f"{name} got no cu_seq_lens_q, so attn_implementation='wlb' cannot tell the documents of the micro-batch "
            f"apart. Feed the model what WLBDataCollator gives. {_OTHER_INPUTS}"
        )
    bounds = cu_seq_lens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(
            f"cu_seq_lens_q must run from 0 to the micro-batch's {tokens} tokens, got {bounds[0]} to {bounds[-1]}"
        )
    longest = max(last - first for first, last in pairwise(bounds))
    if max_length is not None and max_length < longest:
        raise ValueError(f"max_length_q is {max_length}, but cu_seq_lens_q holds a document of {longest} tokens")
    return ShardTensors.whole(cu_seq_lens.to(torch.int32), longest, tokens)


def _of_one_type(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Under autocast its type (norms of queries and keys give float32), else the widest of them."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


def register() -> None:
    """Makes ``attn_implementation="wlb"`` known to Transformers. May be called any number of times."""
    AttentionInterface.register(IMPLEMENTATION, wlb_attention)
    AttentionInterface.register(MASKLESS, wlb_attention)
    # Reduces an all-ones padding mask to None and hands any other mask on, for wlb_attention to refuse.
    AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)


@contextlib.contextmanager
def document_attention_enabled(model: PreTrainedModel, implementation: str = MASKLESS) -> Iterator[None]:
    """Uses document attention inside the block and the model's own implementation after it.

    The model takes no mask inside: one that hides nothing is dropped, another is refused before the forward pass;
    unless it is switched to another implementation meanwhile, as ``plain_attention`` does. Then it refuses packed
    micro-batches.

    Args:
        model: Called itself, by what wraps it, or by its decoder.
        implementation: As registered with Transformers, and without a mask function.
    """
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    another = implementation not in _document_attention
    _document_attention.add(implementation)
    hook = partial(_before_forward, name=type(model).__name__, implementation=implementation)
    # The decoder too: what calls the model's forward without its hooks, as some versions of PEFT, gets to it.
    modules = dict.fromkeys((model, getattr(model, "base_model", model)))
    outermost = model not in _own
    if outermost:
        _own.update(dict.fromkeys(modules, _plain_of(model) if before in _document_attention else before))
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)
        if outermost:
            for module in modules:
                _own.pop(module, None)
        if another:
            _document_attention.discard(implementation)


@contextlib.contextmanager
def plain_attention(model: torch.nn.Module) -> Iterator[None]:
    """Uses the model's own attention inside the block, for ``generate`` and ordinary inputs while it is trained.

    It attends as before training, or by ``"sdpa"`` where it was loaded with ``"wlb"``. After the block, and after an
    exception in it, packed micro-batches go on as before. A model that is not in training is left as it is.

    Args:
        model: As a callback gets it, or what wraps it (PEFT, DDP). Where its parameters are in parts, all processes
            must call it together.

    Raises:
        ValueError: If there is no model of Transformers in it.
    """
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(f"plain_attention is for models of Transformers, got a {type(model).__name__}")
    before = inner.config._attn_implementation
    if before not in _document_attention:
        yield
        return
    inner.set_attn_implementation(_own.get(inner) or _plain_of(inner))
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def _plain_of(model: PreTrainedModel) -> str:
    return "sdpa" if model._supports_sdpa else "eager"


def check_document_attention(model: torch.nn.Module) -> None:
    """Refuses a model that is about to get a packed micro-batch, or a shard, and would not keep documents apart.

    Two strings are compared; nothing waits for the device.

    Args:
        model: Of Transformers, without what wraps it.

    Raises:
        ValueError: Naming the implementation that it has, and how to switch back.
    """
    found = cast(Any, model).config.get_text_config()._attn_implementation  # which is what its layers look at
    if found in _document_attention:
        return
    name = type(model).__name__
    raise ValueError(
        f"{name} got a packed micro-batch, but its attention implementation is {found!r} now and not {MASKLESS!r}: "
        "documents would not be kept apart, and a shard not put together with the others. "
        + (_SWITCHED if model in _own else _NOT_ENABLED)
    )


_SWITCHED = (
    "Something has called set_attn_implementation during training, such as a callback, and has not switched back. Let "
    "it use `with hf_wlb.plain_attention(model): ...`, which does so by itself, or keep "
    "before = model.config._attn_implementation and end with model.set_attn_implementation(before)."
)
_NOT_ENABLED = (
    "train() and evaluate() switch it by themselves; elsewhere call the model inside "
    "`with hf_wlb.attention.document_attention_enabled(model): ...`."
)


def _before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, implementation: str
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook; a copy of the module keeps it, but not its implementation."""
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("wlb_shard") is not None:
        check_document_attention(module)
    if cast(Any, module).config._attn_implementation != implementation:
        return None
    place = _place_of_mask(module) if args else 0
    mask = args[place] if place < len(args) else kwargs.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.all():
        raise ValueError(_hides_tokens(name))
    if place < len(args):
        return (*args[:place], None, *args[place + 1 :]), kwargs
    return args, {**kwargs, "attention_mask": None}


def _place_of_mask(module: torch.nn.Module) -> int:
    """Of ``attention_mask`` among positional arguments; behind all of them where it is none."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [own.name for own in parameters if own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)]
    return names.index("attention_mask") if "attention_mask" in names else sys.maxsize
