"""``torch_compile=True``: every decoder layer compiled in place, once for micro-batches of all lengths.

Accelerate would compile the whole model and wrap it: parameters get other names, and whatever depends on a
micro-batch's documents is compiled anew with every one of them. Here each decoder layer becomes an instance of a
subclass of its class, of the same name, whose forward is compiled for any number of tokens. Gradient checkpointing,
FSDP2's hooks and DDP stay around the compiled part. Attention is called by it but not compiled, see
``hf_wlb.attention.registration.wlb_attention``: its plan changes with every micro-batch, and it talks to other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx.experimental._config
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

#: Versions of one piece of a layer, over all models of a process, before a layer that is compiled again and again is an
#: error: one for each kind of layer (dense or with experts, with or without rotary positions), type to compute in,
#: training and evaluation, and few lengths.
MOST_VERSIONS = 32

#: CUDA graphs are recorded once for every length, and overwrite what gradient checkpointing and accumulation keep.
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_ATTRIBUTE = "_wlb_compiled_forward"


class CompileArguments(Protocol):
    """What is read of ``TrainingArguments``."""

    torch_compile: bool
    torch_compile_backend: str | None
    torch_compile_mode: str | None

    @property
    def device(self) -> torch.device:
        """Where the model is, or will be."""


@dataclass
class CompileDefaults:
    """``CompileArguments`` as of ``torch_compile=True`` alone."""

    device: torch.device
    torch_compile: bool = True
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None


def compile_decoder_layers(model: PreTrainedModel, args: CompileArguments, *, layers: int | None = None) -> int:
    """Compiles every decoder layer of a model in place, as ``args`` say. Best called before FSDP2 shards them.

    Names of modules and parameters, and ``isinstance`` of the layers, stay as they are. Calls with a cache of keys and
    values, as in generation, run uncompiled; so do those of a single token, as dummies that fill the last step are:
    torch would compile layers anew for them. The first forward of every kind of layer takes as long as compiling does.

    Args:
        model: A causal language model of Transformers.
        args: The run's: ``torch_compile``, ``torch_compile_backend`` (default ``"inductor"``), ``torch_compile_mode``
            and ``device``.
        layers: How many of the model's layers are here, on a pipeline stage; all by default.

    Returns:
        The number of layers; 0 without ``torch_compile``.

    Raises:
        ValueError: If the backend or mode is unknown or not supported, the model has no decoder layers that can be
            compiled by themselves, or compilation is switched off in this process.
        RuntimeError: If the backend cannot compile on this machine (a missing C++ compiler or Triton), and later from
            the model's forward if it fails on a layer.
    """
    if not args.torch_compile:
        return 0
    settings = _settings(args)
    found = list(_decoder_layers(model, layers))
    _check_machine(settings, args.device)
    classes: dict[type, type] = {}
    for layer in found:
        owner = _compiled_class(type(layer))
        if owner is None:
            kind = type(layer)
            if kind not in classes:
                classes[kind] = _subclass(kind, settings)
            layer.__class__ = classes[kind]
        elif owner not in classes:  # compiled before, perhaps with other settings
            setattr(owner, _ATTRIBUTE, _compiled(_plain_forward(owner), owner.__name__, settings))
            classes[owner] = owner
    return len(found)


def function_compiler(args: CompileArguments) -> Callable[[Callable[..., Any], str], Callable[..., Any]] | None:
    """What compiles functions between a model's layers, as ``args`` say and for tensors of any size.

    Args:
        args: See ``compile_decoder_layers``.

    Returns:
        Takes a function and what it is called in error messages; None without ``torch_compile``.

    Raises:
        ValueError: If the backend or mode is unknown or not supported.
        RuntimeError: From the compiled function, if the backend fails on it; whether it works on this machine at all is
            seen by ``compile_decoder_layers``, which runs before.
    """
    if not args.torch_compile:
        return None
    settings = _settings(args)
    return lambda function, name: _compiled(function, name, settings)


def no_whole_model_compilation() -> TorchDynamoPlugin:
    """What ``Accelerator`` must be given as ``dynamo_plugin``, so that it does not compile the whole model as well.

    Left to itself it follows environment variables that ``TrainingArguments(torch_compile=True)`` sets, and which stay
    set for later trainers of the process.
    """
    return TorchDynamoPlugin(backend="no")


def _settings(args: CompileArguments) -> dict[str, Any]:
    """Arguments of ``torch.compile``, checked."""
    backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(
            f"torch_compile_backend={backend!r} is not known to torch; it has {', '.join(sorted(known))}. Leave it out "
            "for 'inductor'."
        )
    if mode in _WITH_CUDA_GRAPHS or backend == "cudagraphs":
        given = f"torch_compile_mode={mode!r}" if mode in _WITH_CUDA_GRAPHS else f"torch_compile_backend={backend!r}"
        raise ValueError(
            f"{given} records CUDA graphs, once for every length of a micro-batch, and packed micro-batches all have "
            "different ones. Use torch_compile_mode='default' or 'max-autotune-no-cudagraphs'."
        )
    if mode is not None and backend != "inductor":
        raise ValueError(
            f"torch_compile_mode={mode!r} is for torch_compile_backend='inductor', not {backend!r}; leave it out"
        )
    # Sizes are symbols from the start; so a first version for the first micro-batch's length is never made.
    settings: dict[str, Any] = {"backend": backend, "mode": mode, "dynamic": True}
    try:
        torch.compile(torch.sin, **settings)
    except RuntimeError as error:
        raise ValueError(f"torch_compile_mode={mode!r} is not supported by this torch: {error}") from error
    return settings


def _check_machine(settings: dict[str, Any], device: torch.device) -> None:
    """Compiles three operations: a missing compiler is found now, on every rank, and not in the first step."""
    config = torch._dynamo.config
    if config.disable or config.suppress_errors:
        switch = "disable (TORCH_COMPILE_DISABLE)" if config.disable else "suppress_errors"
        raise ValueError(
            f"torch_compile=True, but torch._dynamo.config.{switch} is set in this process, so layers would run "
            "uncompiled without a word. Unset it, or leave torch_compile out."
        )

    def trial(values: torch.Tensor) -> torch.Tensor:
        return (values.sin() + 1).sum()

    _compiled(trial, "three operations", settings)(torch.ones(8, device=device, requires_grad=True)).backward()


def _decoder_layers(model: PreTrainedModel, there: int | None = None) -> Iterator[torch.nn.Module]:
    """The outermost layers that gradient checkpointing knows."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(module) for layer in found for module in layer.modules() if module is not layer}
    layers = [layer for layer in found if id(layer) not in inner]
    expected = int(model.config.get_text_config().num_hidden_layers) if there is None else there
    if len(layers) < expected:
        raise ValueError(
            f"torch_compile=True compiles decoder layers, but of the {expected} layers of {type(model).__name__} "
            f"{len(layers)} are Transformers' GradientCheckpointingLayer. Leave torch_compile out for this model."
        )
    yield from layers


def _compiled_class(kind: type) -> type | None:
    """Which of a layer's classes is ours, if it was compiled before; FSDP2 may have put its own in front."""
    return next((parent for parent in kind.__mro__ if _ATTRIBUTE in vars(parent)), None)


def _plain_forward(owner: type) -> Callable[..., Any]:
    forward: Callable[..., Any] = owner.__mro__[1].forward  # type: ignore[attr-defined]
    return forward


def _subclass(kind: type, settings: dict[str, Any]) -> type:
    """A subclass of a layer's class that runs the class's own forward compiled.

    Transformers wraps the forward of every such subclass in gradient checkpointing, and lets only the outermost wrapper
    act: it checkpoints around the compiled part. A checkpoint inside it would not be compiled.
    """

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        owner = _compiled_class(type(self))
        assert owner is not None
        if _as_it_is(args, kwargs):
            return _plain_forward(owner)(self, *args, **kwargs)
        return getattr(owner, _ATTRIBUTE)(self, *args, **kwargs)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "forward": forward,
        _ATTRIBUTE: staticmethod(_compiled(kind.forward, kind.__name__, settings)),  # type: ignore[attr-defined]
    }
    return type(kind.__name__, (kind,), namespace)


def _as_it_is(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer's call is one of those that run uncompiled."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    one_token = isinstance(hidden, torch.Tensor) and hidden.shape[1] == 1
    return one_token or any(isinstance(given, Cache) for given in (*args, *kwargs.values()))


def _compiled(function: Callable[..., Any], name: str, settings: dict[str, Any]) -> Callable[..., Any]:
    """The function compiled; where that fails, an error instead of going on uncompiled."""
    compiled = torch.compile(function, **settings)
    said = f"torch_compile=True: {name} could not be compiled with backend {settings['backend']!r}"

    def call(*args: Any, **kwargs: Any) -> Any:
        with _dynamo_settings():
            try:
                return compiled(*args, **kwargs)
            except FailOnRecompileLimitHit as error:
                raise RuntimeError(
                    f"{said} once for all micro-batches: {MOST_VERSIONS} versions were made, and another one is asked "
                    "for. TORCH_LOGS=recompiles says why. Leave torch_compile out for this model."
                ) from error
            except TorchDynamoException as error:
                raise RuntimeError(
                    f"{said}: {_reason(error)}. Leave torch_compile out, or choose another torch_compile_backend."
                ) from error

    return call


@contextlib.contextmanager
def _dynamo_settings() -> Iterator[None]:
    """Sets what ``torch.compile`` has no arguments for; takes some 0.05 ms."""
    # DDP's own splitting of graphs is for a model compiled as a whole, and does not know symbolic sizes.
    settings = {"recompile_limit": MOST_VERSIONS, "fail_on_recompile_limit_hit": True, "optimize_ddp": False}
    # Without duck shapes, sizes that happen to be equal (tokens and the hidden size) are not taken for the same one.
    shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(settings), shapes:
        yield


def _reason(error: Exception) -> str:
    """The first paragraph; what follows is advice on debugging the compiler, and the whole error is chained."""
    return " ".join(str(error).strip().split("\n\n")[0].split()).rstrip(".")
