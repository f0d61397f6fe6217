"""Measured stage costs: what is run is what a stage runs, by its kind, and the trainer cuts by what was found.

The clock is a made-up one that counts: the FLOPs of matrix products and attention in a run, forward and backward.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, PreTrainedConfig
from typer.testing import CliRunner

from hf_wlb import WLBTrainingArguments
from hf_wlb.cli import app
from hf_wlb.profiling import measure_stage_costs
from hf_wlb.staging import StageCosts, StageLayout, stage_costs
from hf_wlb.trainer.stages import stage_layout
from hf_wlb.workload import HardwareFigures, count_model
from tests.numerics.test_families import ACCEPTED, build

UNIT = HardwareFigures("unit", 1.0, 1.0)  # a FLOP takes a second
LAYERS = 4
SHORT = [1] * 48  # documents without attention to speak of
FAMILIES = [
    "llama", "llama, attention bias", "gemma2", "gemma3", "gpt_neox", "granite", "cohere2", "mixtral",
    "gpt_oss, sinks", "deepseek_v3, latent",
]  # fmt: skip


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    family = ACCEPTED[name]
    return build(family._replace(settings={**family.settings, **changes})).config


def added_products(total: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a matrix product that is added in place, by shapes."""
    return int(2 * left[0] * left[1] * right[1])


def flops(run: Callable[[], None]) -> float:
    """What a run multiplies; never nothing, as on a clock."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_products}) as counter:
        run()
    return counter.get_total_flops() + 1.0


def measure(config: PreTrainedConfig, lengths: list[int], **options: Any) -> StageCosts:
    return measure_stage_costs(config, lengths, device="cpu", dtype=torch.float32, **{"timer": flops, **options})


def tiny(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**{**settings, **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_measured_is_what_is_counted(tied: bool) -> None:
    config = tiny(tie_word_embeddings=tied)
    counted = stage_costs(config, SHORT, hardware=UNIT, memory_bytes_per_second=1e9)
    found = measure(config, SHORT, gradient_checkpointing=False)
    assert found.layers == pytest.approx(counted.layers, rel=0.01)  # attention: the kernel counts pairs otherwise
    assert found.after - 1 == counted.after and found.before == 1
    again = measure(config, SHORT, gradient_checkpointing=True)
    # The forward once more, but for its last matrix, whose product no gradient needs.
    once_more = 2 * (count_model(config).layers[0].weights - 32 * 48) * len(SHORT)
    assert again.layers[0] - found.layers[0] == pytest.approx(once_more, rel=0.02)
    assert again.after == found.after  # which takes its gradients in the forward
    # Negative control: with checkpointing a layer is not what it was without.
    assert again.layers[0] != pytest.approx(counted.layers[0], rel=0.1)


def test_layers_of_one_kind_are_measured_once() -> None:
    lines: list[str] = []
    costs = measure(tiny(num_hidden_layers=6), SHORT, tell=lines.append)
    assert [line.split(":")[0] for line in lines] == ["layer 0 (6 alike)", "embedding", "final norm, head and loss"]
    assert len(costs.layers) == 6 and len(set(costs.layers)) == 1
    assert costs.source.startswith("measured on cpu") and costs.source.endswith("documents of 1, 1, 1, 1, ... tokens")


def test_windows_are_told_apart() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = config_of(
        "gemma2", num_hidden_layers=4, layer_types=kinds, sliding_window=16, max_position_embeddings=4096
    )
    lines: list[str] = []
    long = measure(config, [2048], tell=lines.append).layers
    assert [line.split(":")[0] for line in lines][:2] == ["layer 0 (3 alike)", "layer 2 (1 alike)"]
    assert long[0] == long[1] == long[3] < 0.7 * long[2]
    short = measure(config, [16] * 8).layers  # control: no document is longer than the window
    assert short == pytest.approx([short[0]] * 4, rel=0.01)


def test_experts_are_told_from_dense_layers() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    config = config_of("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 2], **experts)
    lines: list[str] = []
    layers = measure(config, SHORT, tell=lines.append).layers
    assert [line.split(":")[0] for line in lines][:2] == ["layer 0 (2 alike)", "layer 1 (2 alike)"]
    assert layers[0] == layers[2] < layers[1] == layers[3]


def test_a_large_vocabulary_is_dearer_than_a_layer() -> None:
    costs = measure(tiny(vocab_size=8192), SHORT)
    assert costs.after > 8 * costs.layers[0]
    assert costs.layout(2).sizes == (3, 1)  # and the trainer would make room for it
    small = measure(tiny(vocab_size=64), SHORT)
    assert small.after < small.layers[0] and small.layout(2).sizes == (2, 2)


def test_the_loss_is_the_one_that_is_asked_for() -> None:
    config = tiny(vocab_size=512)
    chunked, whole = (measure(config, [40, 24], fused_loss=name) for name in ("auto", "off"))
    assert chunked.layers == whole.layers and chunked.after == whole.after  # three products either way
    with pytest.raises(ValueError, match="fused_loss must be one of auto"):
        measure(config, [9], fused_loss="magic")
    with pytest.raises(ValueError, match="it runs on CUDA devices only, not on cpu"):
        measure(config, [9], fused_loss="liger")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_can_be_measured(name: str) -> None:
    config = config_of(name)
    costs = measure_stage_costs(config, [40, 1, 0, 9], device="cpu", dtype=torch.float32, repeats=1)
    assert len(costs.layers) == 2 and min(costs.layers) > 0 and costs.before > 0 and costs.after > 0


def test_gradients_reach_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_wlb.profiling import pieces

    models: list[torch.nn.Module] = []
    original = pieces.materialise

    def watching(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        models.append(model)

    monkeypatch.setattr(pieces, "materialise", watching)
    measure(tiny(tie_word_embeddings=True), [30, 18])
    layer, before, after = (dict(model.named_parameters()) for model in models)
    assert all(parameter.grad is not None for name, parameter in layer.items() if ".layers." in name)
    assert list(before) == ["model.embed_tokens.weight"] and sorted(after) == ["lm_head.weight", "model.norm.weight"]
    for parameter in (*before.values(), *after.values()):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_the_callers_configuration_and_random_state_stay() -> None:
    config, state = tiny(), torch.random.get_rng_state()
    before = config.to_dict()
    measure(config, [9])
    assert config.to_dict() == before and torch.equal(torch.random.get_rng_state(), state)


def no_room(run: Callable[[], None]) -> float:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([], {}, "lengths must be the lengths of one document at least"),
        (None, {}, "Give either lengths or context_length"),
        ([5], {"context_length": 5}, "Give either lengths or context_length"),
        ([5], {"repeats": 0, "timer": None}, "repeats must be at least 1, got 0"),
        ([5], {"attention_kernel": "magic"}, "attention_kernel must be one of .*reference, got 'magic'"),
        ([5], {"attention_kernel": "torch"}, "attention kernel 'torch' was given .* but it "),
        ([3000], {}, "has 3,000 tokens, more than the 2,048 positions of the model"),
        (
            [5, 4],
            {"timer": no_room},
            "A micro-batch of 9 tokens does not fit one part of the model on cpu. Measure few",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(lengths: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(tiny(max_position_embeddings=2048), lengths, **options)


def test_models_that_cannot_be_cut_are_refused() -> None:
    # Without weights it is not known where the learned positions belong.
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel cannot be cut into pipeline stages by names alone: transformer\.wpe"
    ):
        measure(config_of("gpt2"), [9])


# ---- the command ----


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["stages", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_counts_as_the_trainer_does(tmp_path: Path) -> None:
    written = tmp_path / "costs.json"
    result = run("--model", "7B", "--pp", 4, "--context", 131_072, "--json", written)
    assert result.exit_code == 0, result.output
    assert "counted from the config for 'h100', documents of 32768, 32768, 32768, 32768 tokens" in result.stdout
    assert len(StageCosts.load(written).layers) == 32
    outputs = [
        run("--model", "1B", "--pp", 4, *more).stdout
        for more in ([], ["--gradient-checkpointing"], ["--hardware", "cpu"], ["--lengths", "131072"])
    ]
    assert len({output.split("Parts:")[1] for output in outputs}) == 4


def test_the_command_measures_and_the_trainer_cuts_by_it(tmp_path: Path) -> None:
    model, written = tmp_path / "model", tmp_path / "costs.json"
    config = tiny()
    config.save_pretrained(model)
    given = ("--measure", "--device", "cpu", "--dtype", "float32", "--repeats", 1, "--lengths", "40,24", "--pp", 2)
    result = run("--model", model, *given, "--json", written)
    assert result.exit_code == 0, result.output
    assert "measured on cpu" in result.stdout and "in float32, documents of 40, 24 tokens" in result.stdout
    costs = StageCosts.load(written)
    assert stage_layout(config, arguments(tmp_path, pp_stage_costs=str(written))) == costs.layout(2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--dtype", "int8"], "--dtype must be one of bfloat16, float16, float32, got 'int8'"),
        (["--device", "abacus"], "--device must be cpu or, where there is a GPU, cuda; got 'abacus'"),
        (["--lengths", "9,x"], "'9,x' is neither"),
    ],
)
def test_errors_of_measuring_are_one_sentence(options: list[str], sentence: str) -> None:
    result = run("--model", "tiny", "--pp", 2, "--measure", *options)
    assert result.exit_code == 2 and sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# ---- the trainer's argument ----


def arguments(folder: Path, **options: Any) -> WLBTrainingArguments:
    given = {"context_length": 64, "pp_size": 2, "use_cpu": True, "report_to": "none"}
    return WLBTrainingArguments(output_dir=str(folder), **{**given, **options})


def costs_file(folder: Path, *layers: float, after: float = 0.0) -> str:
    path = folder / "costs.json"
    path.write_text(json.dumps({"layers": layers, "before": 0.0, "after": after}))
    return str(path)


def test_stages_are_cut_by_measured_costs(tmp_path: Path) -> None:
    counted = stage_layout(tiny(), arguments(tmp_path))
    measured = arguments(tmp_path, pp_stage_costs=costs_file(tmp_path, 5.0, 1.0, 1.0, 1.0))
    assert stage_layout(tiny(), measured) == StageLayout((0, 1, 4)) != counted
    measured = arguments(tmp_path, pp_stage_costs=costs_file(tmp_path, 1.0, 1.0, 1.0, 1.0, after=2.0))
    assert stage_layout(tiny(), measured) == StageLayout((0, 3, 4))


def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, pp_stage_costs=costs_file(tmp_path, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"pp_stage_costs='.*' holds costs of 2 layers, but the model has 4. Measure"):
        stage_layout(tiny(), args)


def test_measured_costs_that_do_not_go_together_with_others(tmp_path: Path) -> None:
    costs = costs_file(tmp_path, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"pp_stage_costs='.*' is for cutting pipeline stages, but pp_size=1"):
        arguments(tmp_path, pp_size=1, pp_stage_costs=costs)
    with pytest.raises(ValueError, match="pp_stage_costs and pp_stage_layers both say what pipeline stages hold"):
        arguments(tmp_path, pp_stage_layers=[1, 1], pp_stage_costs=costs)
    with pytest.raises(ValueError, match="Layer 0 of the stage costs"):
        arguments(tmp_path, pp_stage_costs=costs_file(tmp_path, 0.0, 1.0))
    with pytest.raises(FileNotFoundError, match="There is no stage costs file"):
        arguments(tmp_path, pp_stage_costs=str(tmp_path / "nowhere.json"))
