"""Tensor parallelism: the parts of a model together are the model, loss and every gradient."""

import copy
import dataclasses
import types
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from hf_wlb.parallel import ParallelMesh, ParameterLayout, shard_parameters
from hf_wlb.parallel.tensor_parallel import enter_tensor_parallel, forwards, split_model, verify_gradients
from tests.numerics.test_families import build
from tests.support.oracle import relative_error
from tests.support.spawn import run_distributed
from tests.support.tensor_parallel import (
    FAMILIES,
    Errors,
    expected_of,
    mesh_of,
    micro_batches,
    run,
    split,
    summed,
    whole_gradients,
)
from tests.support.tolerances import (
    NEGATIVE_CONTROL_FACTOR,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_BFLOAT16,
    TENSOR_PARALLEL_MEAN,
)

#: Every style of plan; the other families that document attention accepts have plans like one of these.
SPLIT = (
    "llama",
    "llama, attention bias",
    "llama, one KV head",
    "qwen3",
    "mistral, window",
    "gemma3",
    "phi3",
    "olmo2",
    "glm4",
    "starcoder2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "gpt_oss, sinks",
    "granite_swa, sinks of own heads",
    "deepseek_v2, latent of own heads",
    "deepseek_v3, latent",
    "aria, experts packed the other way",
)


def errors_of(name: str, mesh: ParallelMesh) -> Errors:
    model, layout, expected = split(name, mesh)
    loss = run(model, mesh)
    verify_gradients(model, mesh, layout.tensor_shards)
    return expected.errors(loss, whole_gradients(model, layout))


def are_small(errors: Errors) -> bool:
    return max(errors.loss, errors.worst) <= TENSOR_PARALLEL and errors.mean <= TENSOR_PARALLEL_MEAN


# ---- two ranks ----


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    mesh = mesh_of(tp=2)
    return {
        "families": {name: errors_of(name, mesh) for name in SPLIT},
        "controls": controls(mesh),
        "sinks that the plan leaves out": unnamed_sinks(mesh),
        "checkpointing": with_checkpointing(mesh),
        "autocast": with_autocast(mesh),
        "compile": compiled(mesh),
        "copy": of_a_copy(mesh),
        "enter": entered(mesh, rank),
        "generate": generated(mesh),
    }


def controls(mesh: ParallelMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = build(FAMILIES["qwen3"])
    expected = expected_of(model)
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("_norm")}
    layout = ParameterLayout(mesh, split_model(model, mesh))
    found["norms not summed"] = expected.errors(run(model, mesh), whole_gradients(model, layout)).worst
    try:
        verify_gradients(model, mesh, layout.tensor_shards)
    except ValueError as error:
        found["told"] = str(error)
    model, layout, expected = split("llama, attention bias", mesh)
    for layer in model.model.layers:
        output = layer.self_attn.o_proj
        output.forward = types.MethodType(forwards.summed_output, output)
    found["bias added twice"] = expected.errors(run(model, mesh), whole_gradients(model, layout)).worst
    model, layout, expected = split("llama, one KV head", mesh)
    for layer in model.model.layers:
        key = layer.self_attn.k_proj
        key._tensor_parallel = dataclasses.replace(key._tensor_parallel, copies=())
    found["copies of keys not summed"] = expected.errors(run(model, mesh), whole_gradients(model, layout)).worst
    return found


def unnamed_sinks(mesh: ParallelMesh) -> Errors:
    model = build(FAMILIES["granite_swa, sinks of own heads"])
    expected = expected_of(model)
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("sinks")}
    layout = ParameterLayout(mesh, split_model(model, mesh))
    assert "model.layers.0.self_attn.sinks" in layout.tensor_shards
    return expected.errors(run(model, mesh), whole_gradients(model, layout))


def with_checkpointing(mesh: ParallelMesh) -> bool:
    """Whether gradients are the same to the last bit."""
    found = []
    for checkpointing in (False, True):
        model, layout, _ = split("qwen3", mesh)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        run(model, mesh)
        found.append(whole_gradients(model, layout))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def with_autocast(mesh: ParallelMesh) -> dict[str, float]:
    """In units of what bfloat16 may round: against one process."""
    worst = {}
    for name in ("llama, attention bias", "qwen3", "llama, one KV head"):
        alone = build(FAMILIES[name])
        model, layout, _ = split(name, mesh)
        with torch.autocast("cpu", torch.bfloat16):
            run(alone, mesh)
            run(model, mesh)
        found = whole_gradients(model, layout)
        expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        joint = [torch.cat([part[name].flatten() for name in expected]) for part in (found, expected)]
        worst[name] = relative_error(*joint)
    return worst


def compiled(mesh: ParallelMesh) -> tuple[float, int]:
    """Decoder layers in one graph each: how far off gradients are, and how many graphs serve both layers."""
    outputs = []
    for compiling in (False, True):
        model, _, _ = split("qwen3, one KV head", mesh)
        model.set_attn_implementation("sdpa")
        counters.clear()
        for layer in model.model.layers if compiling else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        loss = model(input_ids=torch.tensor([micro_batches()[0][2]]), use_cache=False).logits.square().mean()
        loss.backward()
        outputs.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return relative_error(outputs[1], outputs[0]), counters["stats"]["unique_graphs"]


def of_a_copy(mesh: ParallelMesh) -> tuple[float, bool]:
    """A copy works, with its own parameters."""
    model, layout, expected = split("qwen3", mesh)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    errors = expected.errors(run(other, mesh), whole_gradients(other, layout))
    return errors.worst, all(parameter.grad is None for parameter in model.parameters())


def generated(mesh: ParallelMesh) -> bool:
    """Whether it goes on as one process would, with its cache of own KV heads."""
    alone = build(FAMILIES["llama, one KV head"])
    model, _, _ = split("llama, one KV head", mesh)
    options = {"input_ids": torch.tensor([micro_batches()[0][2]]), "max_new_tokens": 8, "do_sample": False}
    return torch.equal(model.generate(**options), alone.generate(**options))


def entered(mesh: ParallelMesh, rank: int) -> list[float]:
    hidden = torch.ones(3, requires_grad=True)
    same = enter_tensor_parallel(hidden, mesh.tp_group)
    (same * (rank + 1)).sum().backward()
    assert hidden.grad is not None and torch.equal(same, hidden)
    alone = torch.ones(1)
    assert enter_tensor_parallel(alone, None) is alone
    return hidden.grad.tolist()


def test_two_ranks() -> None:
    first, second = run_distributed(on_two_ranks, 2, timeout_s=400)
    for found in (first, second):
        wrong = {name: errors for name, errors in found["families"].items() if not are_small(errors)}
        assert not wrong, wrong
        assert are_small(found["sinks that the plan leaves out"])
        told = found["controls"].pop("told")
        assert "different gradients of model.layers.0.self_attn.q_norm.weight" in told and "Qwen3ForCausalLM" in told
        for control, error in found["controls"].items():
            assert error > NEGATIVE_CONTROL_FACTOR * TENSOR_PARALLEL, control
        assert found["checkpointing"]
        assert max(found["autocast"].values()) <= TENSOR_PARALLEL_BFLOAT16, found["autocast"]
        error, graphs = found["compile"]
        assert error <= TENSOR_PARALLEL and graphs == 1
        assert found["copy"][0] <= TENSOR_PARALLEL and found["copy"][1]
        assert found["generate"]
        assert found["enter"] == [3.0, 3.0, 3.0]


# ---- four ranks ----


def on_four_ranks(rank: int, world_size: int) -> dict[str, Errors]:
    four = mesh_of(tp=4)
    found = {f"tp4, {name}": errors_of(name, four) for name in ("llama, attention bias", "qwen3", "mixtral")}
    mesh = mesh_of(cp=2, tp=2)
    for name in ("llama", "qwen3", "granite_swa, sinks of own heads"):
        model, layout, expected = split(name, mesh)
        loss = run(model, mesh)
        found[f"cp2 x tp2, {name}"] = expected.errors(*summed(loss, whole_gradients(model, layout), mesh))
    mesh = mesh_of(dp_shard=2, tp=2)
    for name in ("llama, attention bias", "qwen3", "phi3", "mixtral"):
        found[f"fsdp2 x tp2, {name}"] = replicated(name, mesh, sharded=True)
    found["dp2 x tp2, qwen3"] = replicated("qwen3", mesh_of(dp_replicate=2, tp=2), sharded=False)
    return found


def replicated(name: str, mesh: ParallelMesh, sharded: bool) -> Errors:
    """Every replica has one of the micro-batches, twice: at half its weight, as if accumulated; checkpointing."""
    model, layout, expected = split(name, mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    wrapped: Any = model
    if sharded:
        shard_parameters(model, mesh)
    else:
        wrapped = DistributedDataParallel(model, process_group=mesh.token_group)
    own = micro_batches()[mesh.dp_rank]
    wrapped.config, wrapped.set_attn_implementation = model.config, model.set_attn_implementation
    loss = run(wrapped, mesh, [own, own]) / 2  # gradients are averaged over the two replicas, too
    verify_gradients(model, mesh, layout.tensor_shards)
    return expected.errors(summed(loss, {}, mesh)[0], whole_gradients(model, layout))


def test_four_ranks() -> None:
    for found in run_distributed(on_four_ranks, 4, timeout_s=400):
        wrong = {case: errors for case, errors in found.items() if not are_small(errors)}
        assert len(found) == 11 and not wrong, wrong
