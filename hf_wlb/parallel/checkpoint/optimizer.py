"""Optimizer state by parameter name: the same files for every split, a single process included.

``optimizer-00001-of-00002.safetensors`` and so on hold whole tensors called ``<parameter>.<state>``, such as
``model.norm.weight.exp_avg``; ``optimizer.safetensors.index.json`` holds the hyper-parameters of every group with the
names of its parameters, and states that are Python numbers. Names are those of the model in memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import optim

from hf_wlb.parallel.agreement import failing_together
from hf_wlb.parallel.checkpoint.files import MOST_BYTES_PER_FILE, Naming, Part, write_tensors
from hf_wlb.parallel.checkpoint.names import named_parameters
from hf_wlb.parallel.checkpoint.reading import TensorFiles, listed
from hf_wlb.parallel.checkpoint.regions import gather_whole, held, held_ranges, whole_shape
from hf_wlb.parallel.checkpoint.stages import of_stages
from hf_wlb.parallel.parameter_layout import ParameterLayout

STATE = Naming("optimizer", single=False)

#: Every element of a parameter is updated by itself: parts of it can be updated by themselves, too.
_ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
#: Those of them that ``TrainingArguments.optim`` names.
ELEMENTWISE_OPTIM_NAMES = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
#: How an update is computed, which is this run's business; not what it computes.
_OWN_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")

_UNLIKE = "the optimizer's groups are not the same on all pipeline stages:"
_LIKE = "Make the same groups on every stage, in the same order and with the same options; they may be empty there."


def saved_by_name(optimizer: Any) -> bool:
    """Whether the state of an optimizer can be written by parameter name, and read under another split.

    >>> saved_by_name(optim.SGD([torch.zeros(1, requires_grad=True)]))
    True
    """
    return type(_inner(optimizer)) in _ELEMENTWISE


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that would compute something else from parts of parameters than from whole ones.

    Args:
        optimizer: Or its class, or what ``TrainingArguments.optim`` says.

    Raises:
        ValueError: Naming those that can be used.

    >>> check_optimizer("adamw_torch_fused")
    >>> check_optimizer("adafactor")
    Traceback (most recent call last):
    ValueError: the optimizer adafactor is not supported where parameters are split (fsdp, pp_size, tp_size): ...
    """
    if isinstance(optimizer, str):
        name, allowed = optimizer, optimizer in ELEMENTWISE_OPTIM_NAMES
    else:
        kind = optimizer if isinstance(optimizer, type) else type(_inner(optimizer))
        name, allowed = kind.__name__, kind in _ELEMENTWISE
    if not allowed:
        raise ValueError(
            f"the optimizer {name} is not supported where parameters are split (fsdp, pp_size, tp_size): it looks at "
            "whole matrices, or keeps state of another shape than the parameters. Set optim to one of "
            f"{', '.join(ELEMENTWISE_OPTIM_NAMES)}, or pass optimizer_cls_and_kwargs with a class of torch.optim "
            "that treats every element by itself."
        )


def has_optimizer(folder: str) -> bool:
    """Whether a checkpoint holds optimizer state by parameter name."""
    return os.path.isfile(os.path.join(folder, STATE.index))


def save_optimizer(
    optimizer: Any,
    model: torch.nn.Module,
    layout: ParameterLayout,
    folder: str,
    *,
    leads: bool,
    most_bytes: int = MOST_BYTES_PER_FILE,
) -> None:
    """Writes the state of an optimizer; all processes must call this together, and leave together.

    The files are those of an optimizer of the whole model, see ``verify_groups``; none has state of two stages.

    Args:
        optimizer: One that ``saved_by_name``.
        model: The model that it trains, or this process's stage of it.
        layout: How the model's parameters are split.
        folder: The checkpoint.
        leads: See ``write_tensors``.
        most_bytes: In a file, unless one tensor alone is larger.

    Raises:
        ValueError: If the optimizer updates parameters that are not the model's, or has state of an unknown shape; or
            see ``verify_groups`` and ``write_tensors``.
        OSError: If this process could not write its files; the others raise a RuntimeError.
    """
    groups = verify_groups(optimizer, model, layout)
    inner, parts, numbers = _inner(optimizer), list[Part](), dict[str, int | float]()
    with failing_together(place=layout.mesh.place):
        named = [member for _, parameters in _named_groups(inner, model) for member in parameters.items()]
        for name, parameter in named:
            if name in layout.copies:
                continue  # written by the stage that owns it
            for key, value in sorted(inner.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    parts.append(_part(layout, name, key, value, parameter))
                elif value is not None:
                    numbers[f"{name}.{key}"] = value
    all_numbers = {key: value for of_stage in of_stages(layout.mesh, numbers) for key, value in of_stage.items()}
    write_tensors(
        parts,
        folder,
        STATE,
        mesh=layout.mesh,
        leads=leads,
        describe=lambda weight_map, size: {
            "metadata": {"optimizer": type(inner).__name__, "total_size": size},
            "param_groups": groups,
            "numbers": all_numbers,
            "weight_map": weight_map,
        },
        most_bytes=most_bytes,
    )


def verify_groups(optimizer: Any, model: torch.nn.Module, layout: ParameterLayout) -> list[dict[str, Any]]:
    """The groups of the whole model's optimizer, of those of all stages; all processes must call this together.

    Each stage of a pipeline has its own parameters of every group, or none. Schedules and checkpoints go by the place
    of a group, which so must be the same for all of its parameters.

    Args:
        optimizer: One that ``saved_by_name``.
        model: The model that it trains, or this process's stage of it.
        layout: How the model's parameters are split.

    Returns:
        For each group its options, and ``params``: names, stage after stage. The same on every process.

    Raises:
        ValueError: If the optimizer updates parameters that are not the model's, or the stages' groups differ in their
            number or options.
    """
    with failing_together(place=layout.mesh.place):
        own = [
            {
                **{name: _plain_option(value) for name, value in group.items() if name not in _OWN_OPTIONS},
                "params": [layout.whole_name(name) for name in parameters],
            }
            for group, parameters in _named_groups(_inner(optimizer), model)
        ]
    stages = of_stages(layout.mesh, own)
    with failing_together(place=layout.mesh.place):
        return _merged(stages)


def load_optimizer(optimizer: Any, model: torch.nn.Module, layout: ParameterLayout, folder: str) -> None:
    """Reads this process's part of an optimizer's state, and the groups' hyper-parameters; no communication.

    A stage of a pipeline leaves to the others what ``layout.elsewhere`` names, see ``load_weights``.

    Args:
        optimizer: Of the class that was saved; it may be empty.
        model: The model that it trains, or this process's stage of it.
        layout: How the model's parameters are split.
        folder: The checkpoint.

    Raises:
        ValueError: If files are damaged, or the optimizer or its parameters are others than the saved ones.
    """
    inner, files = _inner(optimizer), TensorFiles(folder, STATE)
    saved = _Saved.of(files)
    if saved.optimizer != type(inner).__name__:
        raise ValueError(
            f"{folder} was written by the optimizer {saved.optimizer}, and this run's is {type(inner).__name__}. Set "
            "optim as it was."
        )
    groups = list(_named_groups(inner, model))
    of_others = layout.elsewhere - {layout.whole_name(name) for name in named_parameters(model)}
    trained = {layout.whole_name(name) for _, parameters in groups for name in parameters}
    differing = sorted((trained ^ saved.group_of.keys()) - of_others)
    if differing:
        raise ValueError(
            f"the optimizer's parameters are not those of {folder}: they differ in {listed(differing)}. Train the same "
            "parameters as before."
        )
    for place, (group, parameters) in enumerate(groups):
        saved.restore(group, [layout.whole_name(name) for name in parameters], place)
        on_device = bool(group.get("capturable") or group.get("fused"))
        for name, parameter in parameters.items():
            whole_name = layout.whole_name(name)
            state = {
                key: _state(layout, name, parameter, files, full, on_device)
                for key, full in saved.tensors.get(whole_name, {}).items()
            }
            if state or whole_name in saved.numbers:
                inner.state[parameter] = {**state, **saved.numbers.get(whole_name, {})}


@dataclass(frozen=True)
class _Saved:
    """What the index says: the groups' options, and by parameter name its group's and its states."""

    optimizer: str
    groups: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, str]]
    numbers: Mapping[str, Mapping[str, int | float]]

    @classmethod
    def of(cls, files: TensorFiles) -> _Saved:
        try:
            index = files.index
            groups = [{key: of for key, of in group.items() if key != "params"} for group in index["param_groups"]]
            members = zip(groups, index["param_groups"], strict=True)
            group_of = {name: options for options, group in members for name in group["params"]}
            numbers, name_of = dict(index["numbers"]), str(index["metadata"]["optimizer"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            path = os.path.join(files.folder, STATE.index)
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}). Take another checkpoint."
            ) from error
        return cls(name_of, groups, group_of, _by_parameter({key: key for key in files.files}), _by_parameter(numbers))

    def restore(self, group: dict[str, Any], parameters: Collection[str], place: int) -> None:
        """Gives a group the options that its parameters had; one without any, those of the group in its place."""
        options = [self.group_of[name] for name in parameters] or list(self.groups[place : place + 1])
        if any(other != options[0] for other in options):
            raise ValueError(
                f"{listed(list(parameters))} had different hyper-parameters when they were saved, and share a group "
                "now. Build the optimizer's groups as they were."
            )
        for name, value in (options[0] if options else {}).items():
            now = group.get(name)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(now, tuple) else value


def _inner(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _by_parameter(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, state = key.rpartition(".")
        found.setdefault(name, {})[state] = value
    return found


def _named_groups(inner: Any, model: torch.nn.Module) -> Iterable[tuple[dict[str, Any], dict[str, torch.nn.Parameter]]]:
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    for group in inner.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise ValueError(
                "the optimizer updates parameters that are not the model's. Make it after the trainer has split the "
                "model: set optim, or override create_optimizer, instead of passing optimizers=..."
            )
        yield group, {names[id(parameter)]: parameter for parameter in group["params"]}


def _merged(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One optimizer's groups of those of all stages, a tied parameter's once.

    >>> _merged([[{"lr": 0.1, "params": ["a", "b"]}], [{"lr": 0.1, "params": ["c", "a"]}]])
    [{'lr': 0.1, 'params': ['a', 'b', 'c']}]
    """
    counts = [len(groups) for groups in stages]
    if len(set(counts)) > 1:
        raise ValueError(f"{_UNLIKE} there are {', '.join(map(str, counts))} of them on the stages. {_LIKE}")
    found: list[dict[str, Any]] = []
    for place, groups in enumerate(zip(*stages, strict=True)):
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        for stage, other in enumerate(options):
            if other != options[0]:
                name = next(name for name in {**options[0], **other} if options[0].get(name) != other.get(name))
                raise ValueError(
                    f"{_UNLIKE} {name} of group {place} is {options[0].get(name)} on stage 0 and {other.get(name)} on "
                    f"stage {stage}. {_LIKE}"
                )
        found.append({**options[0], "params": list(dict.fromkeys(name for of in groups for name in of["params"]))})
    counted = Counter(name for group in found for name in group["params"])
    twice = [name for name, count in counted.items() if count > 1]
    if twice:
        raise ValueError(f"{_UNLIKE} {listed(twice)}, which two stages have, is in two of them. {_LIKE}")
    return found


def _plain_option(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain_option(of) for of in value] if isinstance(value, tuple | list) else value


def _is_scalar(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return value.ndim == 0 and parameter.ndim > 0


def _part(layout: ParameterLayout, name: str, key: str, value: torch.Tensor, parameter: torch.Tensor) -> Part:
    full, scalar = f"{name}.{key}", _is_scalar(value, parameter)
    if not scalar and value.shape != parameter.shape:
        raise ValueError(
            f"the optimizer's {key} of {name} is {list(value.shape)} and the parameter {list(parameter.shape)}: only "
            "state of the parameter's shape, or single numbers, can be saved by name."
        )

    def gather(keep: bool) -> Mapping[str, torch.Tensor]:
        if scalar:
            return {full: value.detach().to("cpu")} if keep else {}
        whole = gather_whole(layout, name, value, keep)
        return {} if whole is None else {full: whole}

    shape = torch.Size() if scalar else whole_shape(layout, name, value)
    return Part({full: torch.empty(shape, dtype=value.dtype, device="meta")}, gather)


def _state(
    layout: ParameterLayout, name: str, parameter: torch.Tensor, files: TensorFiles, key: str, on_device: bool
) -> torch.Tensor:
    """This process's part of one state, laid out as the parameter is."""
    shape, expected = files.shape(key), whole_shape(layout, name, parameter)
    if shape == () and parameter.ndim > 0:
        number = files.read(key)
        assert number is not None
        return number.to(parameter.device) if on_device else number
    if shape != expected:
        raise ValueError(
            f"{key} is {list(shape)} in {files.folder}, but the parameter is {list(expected)}. Take the checkpoint of "
            "a model of the same configuration."
        )
    part = files.read(key, held_ranges(layout, name, parameter))
    state = torch.zeros_like(parameter, dtype=files.dtype(key), requires_grad=False)
    if part is not None:
        held(state).copy_(part)
    return state
