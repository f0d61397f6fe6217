"""Compiled decoder layers: the same numbers, one compilation for all lengths, and never uncompiled without a word."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

import hf_wlb.compilation as compilation
from hf_wlb.attention import AttentionContext, ShardTensors, document_attention_enabled
from hf_wlb.compilation import compile_decoder_layers, no_whole_model_compilation
from tests.numerics.test_families import ACCEPTED, build
from tests.support.compiled import compile_arguments, graphs, inputs_of, loss_and_gradients_of, micro_batches
from tests.support.oracle import relative_error, worst_error
from tests.support.tiny_llama import tiny_llama
from tests.support.tolerances import COMPILED

MOST_RECOMPILATIONS = 3
#: Of a Llama layer: norm; queries, keys and values; output projection; the rest.
PIECES = 4
ALONE = AttentionContext()


class CountingBackend:
    """Runs graphs as they are and counts the runs."""

    runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            self.runs += 1
            return graph.forward(*given)

        return run


#: One for all tests: what one of them compiled for a tiny Llama serves the others.
COUNTING = CountingBackend()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingBackend:
    check = compilation._settings
    monkeypatch.setattr(compilation, "_settings", lambda args: {**check(args), "backend": COUNTING})
    return COUNTING


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the variables that TrainingArguments sets put back afterwards."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")


def errors_and_graphs(model: Any, plain: Any, count: int) -> tuple[float, int]:
    """The worst error over micro-batches of other lengths, and the graphs compiled after the first of them."""
    worst, first = 0.0, 0
    for rows in micro_batches(count):
        inputs = inputs_of(rows, ALONE)
        loss, gradients = loss_and_gradients_of(model, inputs)
        first = first or graphs()
        expected = loss_and_gradients_of(plain, inputs)
        worst = max(worst, relative_error(loss, expected[0]), worst_error(gradients, expected[1]))
    return worst, graphs() - first


def test_fifty_lengths_are_compiled_for_once(counting: CountingBackend, tmp_path: Path) -> None:
    model = tiny_llama().train()
    plain, names = copy.deepcopy(model), list(model.state_dict())
    kinds = [(type(module).__name__, type(module).__module__) for module in model.modules()]
    assert compile_decoder_layers(model, compile_arguments(tmp_path)) == 2
    assert list(model.state_dict()) == names and type(model) is type(plain)
    assert [(type(module).__name__, type(module).__module__) for module in model.modules()] == kinds
    assert all(isinstance(new, type(old)) for new, old in zip(model.modules(), plain.modules(), strict=True))
    before, runs = graphs(), counting.runs
    error, recompilations = errors_and_graphs(model, plain, 50)
    assert graphs() > before and counting.runs - runs == 50 * 2 * PIECES
    assert error <= COMPILED
    assert recompilations <= MOST_RECOMPILATIONS


def test_the_compiler_does_not_look_into_plans() -> None:
    # torch 2.11 guards on every field of a frozen dataclass, and compiles anew for other numbers of documents.
    for given in (ShardTensors, AttentionContext):
        assert not vars(given)["__dataclass_params__"].frozen, given


def test_experts(counting: CountingBackend, tmp_path: Path) -> None:
    """How many tokens each of them gets is a matter of data."""
    model = build(ACCEPTED["mixtral"]).float().train()
    plain = copy.deepcopy(model)
    assert compile_decoder_layers(model, compile_arguments(tmp_path)) == 2
    error, recompilations = errors_and_graphs(model, plain, 12)
    assert error <= COMPILED
    assert recompilations <= MOST_RECOMPILATIONS


def test_every_family_has_layers_to_compile() -> None:
    for name, family in ACCEPTED.items():
        model = build(family)
        assert len(list(compilation._decoder_layers(model))) == 2, name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_repeats_the_compiled_layer(
    checkpointing: bool, counting: CountingBackend, tmp_path: Path
) -> None:
    model = tiny_llama().train()
    plain = copy.deepcopy(model)
    compile_decoder_layers(model, compile_arguments(tmp_path))
    if checkpointing:
        model.activation_checkpointing_enable()
    assert errors_and_graphs(model, plain, 3)[0] <= COMPILED
    before, forward = counting.runs, 2 * PIECES
    loss_and_gradients_of(model, inputs_of([[3, 4, 5]], ALONE))
    runs = counting.runs - before  # recomputing may stop before the last piece
    assert 2 * forward - 2 <= runs <= 2 * forward if checkpointing else runs == forward


def test_layers_with_adapters_are_found(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny_llama(), config)
    names = list(model.state_dict())
    assert compile_decoder_layers(model.get_base_model(), compile_arguments(tmp_path)) == 2
    assert list(model.state_dict()) == names


def test_generation_runs_as_it_is(counting: CountingBackend, tmp_path: Path) -> None:
    model = tiny_llama()
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    compile_decoder_layers(model, compile_arguments(tmp_path))
    before = counting.runs
    assert torch.equal(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False), expected)
    assert counting.runs == before
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert counting.runs > before


def test_one_token_is_not_compiled_for(counting: CountingBackend, tmp_path: Path) -> None:
    model = tiny_llama().train()
    compile_decoder_layers(model, compile_arguments(tmp_path))
    before = counting.runs
    inputs = inputs_of([[3]], ALONE) | {"labels": torch.tensor([[4]])}
    with document_attention_enabled(model):
        found = model(**inputs).logits
    with document_attention_enabled(plain := tiny_llama()):
        assert torch.equal(found, plain(**inputs).logits)
    assert counting.runs == before


def test_again_with_other_settings_and_copied(tmp_path: Path, counting: CountingBackend) -> None:
    model = tiny_llama().train()
    arguments = compile_arguments(tmp_path)
    compile_decoder_layers(model, arguments)
    counting.runs = 0
    assert compile_decoder_layers(model, arguments) == 2
    kinds = {type(layer).__mro__[1] for layer in model.model.layers}
    assert [kind.__name__ for kind in kinds] == ["LlamaDecoderLayer"] and type(model.model.layers[0]) not in kinds
    loss, gradients = loss_and_gradients_of(copy.deepcopy(model), inputs_of([[3, 4, 5]], ALONE))
    assert counting.runs > 1
    expected = loss_and_gradients_of(tiny_llama().train(), inputs_of([[3, 4, 5]], ALONE))
    assert max(relative_error(loss, expected[0]), worst_error(gradients, expected[1])) <= COMPILED


def test_without_torch_compile_nothing_changes(tmp_path: Path) -> None:
    model = tiny_llama()
    kinds = [type(module) for module in model.modules()]
    assert compile_decoder_layers(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True)) == 0
    assert [type(module) for module in model.modules()] == kinds


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown backend": ({"torch_compile_backend": "inducter"}, "'inducter' is not known to torch; it has .*inductor"),
    "CUDA graphs by mode": (
        {"torch_compile_backend": None, "torch_compile_mode": "reduce-overhead"},
        "torch_compile_mode='reduce-overhead' records CUDA graphs, once for every length",
    ),
    "CUDA graphs by backend": ({"torch_compile_backend": "cudagraphs"}, "'cudagraphs' records CUDA graphs"),
    "mode of another backend": ({"torch_compile_mode": "default"}, "is for torch_compile_backend='inductor', not 'aot"),
    "unknown mode": (
        {"torch_compile_backend": "inductor", "torch_compile_mode": "fast"},
        "torch_compile_mode='fast' is not supported by this torch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path) -> None:
    options, sentence = REFUSED[case]
    model = tiny_llama()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=sentence):
        compile_decoder_layers(model, compile_arguments(tmp_path, **options))
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("switch", ["disable", "suppress_errors"])
def test_refuses_what_would_leave_layers_uncompiled(switch: str, tmp_path: Path) -> None:
    with torch._dynamo.config.patch(**{switch: True}), pytest.raises(ValueError, match=f"{switch}.* is set in this"):
        compile_decoder_layers(tiny_llama(), compile_arguments(tmp_path))


def test_refuses_a_model_whose_layers_are_not_to_be_found(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.layers[0] = torch.nn.Identity()
    with pytest.raises(ValueError, match="of the 2 layers of LlamaForCausalLM 1 are"):
        compile_decoder_layers(model, compile_arguments(tmp_path))


@pytest.mark.parametrize("graph", ["of the trial", "of a layer"])
def test_a_failing_backend_says_so(graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: torch.fx.GraphModule, inputs: Any) -> Any:
        if graph == "of the trial" or any("rsqrt" in str(node.target) for node in module.graph.nodes):
            raise OSError("no compiler on this machine")
        return module.forward

    check = compilation._settings
    monkeypatch.setattr(compilation, "_settings", lambda args: {**check(args), "backend": failing})
    what = "three operations" if graph == "of the trial" else "LlamaDecoderLayer"
    model = tiny_llama()
    with pytest.raises(RuntimeError, match=f"{what} could not be compiled .*no compiler on this machine. Leave torch_"):
        compile_decoder_layers(model, compile_arguments(tmp_path))
        loss_and_gradients_of(model, inputs_of([[3, 4, 5]], ALONE))


def test_what_attention_refuses_comes_through(counting: CountingBackend, tmp_path: Path) -> None:
    model = tiny_llama().train()
    compile_decoder_layers(model, compile_arguments(tmp_path))
    inputs = inputs_of([[3, 4, 5]], ALONE) | {"wlb_shard": inputs_of([[3, 4]], ALONE)["wlb_shard"]}
    with pytest.raises(ValueError, match="the plan is for a shard of 2 tokens, but the model was given 3"):
        loss_and_gradients_of(model, inputs)


def test_accelerate_compiles_nothing_itself(tmp_path: Path) -> None:
    compile_arguments(tmp_path)  # sets variables that Accelerate would follow
    layer = torch.nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True, dynamo_plugin=no_whole_model_compilation())
    assert accelerator.state.dynamo_plugin.backend.value == "NO"
    assert accelerator.prepare_model(layer) is layer


def test_control_layers_compiled_per_length_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = compilation._settings
    monkeypatch.setattr(compilation, "_settings", lambda args: {**check(args), "dynamic": False})
    monkeypatch.setattr(compilation, "MOST_VERSIONS", 4)
    model = tiny_llama().train()
    torch._dynamo.reset()  # what other tests compiled, for any length, would do
    compile_decoder_layers(model, compile_arguments(tmp_path, "eager"))
    assert errors_and_graphs(model, tiny_llama().train(), 2)[1] > MOST_RECOMPILATIONS
    with pytest.raises(RuntimeError, match=r"LlamaDecoderLayer could not be compiled .* 4 versions were made"):
        errors_and_graphs(model, tiny_llama().train(), 3)
