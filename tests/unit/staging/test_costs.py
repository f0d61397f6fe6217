"""What layers, embedding and head cost: together the workload model's price, each by its own kind."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from hf_wlb.staging import StageCosts, StageLayout, stage_costs, typical_lengths
from hf_wlb.workload import AnalyticWorkload, HardwareFigures
from tests.support.simulated import SLIDING, SPARSE, config

LENGTHS = [3000, 700, 41]
UNIT = HardwareFigures("unit", 1.0, 1.0)  # a FLOP takes a second


LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize("changes", [{}, SLIDING, SPARSE, LATENT], ids=["llama", "sliding", "sparse", "latent"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_and_head_add_up_to_the_workload_model(changes, checkpointing, tp_size):
    hardware = HardwareFigures("mine", 3e3, 2e3, 1e3, linear_overhead_seconds_per_token=0.1)
    options = {"tp_size": tp_size, "gradient_checkpointing": checkpointing}
    costs = stage_costs(config(**changes), LENGTHS, hardware=hardware, memory_bytes_per_second=1e3, **options)
    workload = AnalyticWorkload.from_config(config(**changes), hardware, **options)
    assert len(costs.layers) == 4
    assert sum(costs.layers) + costs.after == pytest.approx(workload.micro_batch(LENGTHS), rel=1e-12)
    # Negative control: the embedding is no matrix product, and checkpointing is not free.
    assert sum(costs.layers) + costs.after + costs.before != pytest.approx(workload.micro_batch(LENGTHS), rel=1e-6)
    other = AnalyticWorkload.from_config(config(**changes), hardware, tp_size=tp_size)
    assert (other == workload) is not checkpointing


def test_costs_by_hand():
    weights = 2 * 64 + 2 * 32 + 3 * 96  # q and o, k and v, gate, up and down
    pairs = 10 * 11 // 2
    costs = stage_costs(config(), [10], hardware=UNIT, memory_bytes_per_second=1.0)
    layer = 6 * weights * 10 + pairs * 4 * 8 * (1 + 2.5)
    assert costs.layers == pytest.approx([layer] * 4)
    assert costs.after == pytest.approx(6 * 8 * 16 * 10)
    assert costs.before == 2 * (5 * 8 * 10 + 4 * 8 * 16)
    again = stage_costs(config(), [10], hardware=UNIT, memory_bytes_per_second=1.0, gradient_checkpointing=True)
    assert again.layers == pytest.approx([layer + 2 * weights * 10 + pairs * 4 * 8] * 4)
    # The loss takes its gradients in the forward: nothing of it is computed again.
    assert (again.before, again.after) == (costs.before, pytest.approx(costs.after))


def test_every_layer_has_the_cost_of_its_kind():
    sliding = stage_costs(config(**SLIDING), LENGTHS, hardware=UNIT, memory_bytes_per_second=1.0).layers
    assert sliding[0] == sliding[2] == sliding[3] < sliding[1]
    short = stage_costs(config(**SLIDING), [100] * 7, hardware=UNIT, memory_bytes_per_second=1.0).layers
    assert short == pytest.approx([short[0]] * 4)  # no document is longer than the window
    dense = 3 * 8 * 12
    experts = 8 * 8 + 2 * 3 * 8 * 10
    sparse = stage_costs(config(**SPARSE), [10], hardware=UNIT, memory_bytes_per_second=1.0).layers
    assert [each - sparse[0] for each in sparse] == pytest.approx([0, 0, 0, 6 * 10 * (experts - dense)])
    latent = stage_costs(config(**LATENT), [10], hardware=UNIT, memory_bytes_per_second=1.0).layers
    assert latent[1:] == pytest.approx([latent[0] + 6 * 10 * (experts + 3 * 8 * 10 - dense)] * 3)


def test_layouts_follow_the_costs():
    model = config(vocab_size=512, num_hidden_layers=12)
    head_heavy = stage_costs(model, context_length=64, hardware=UNIT, memory_bytes_per_second=1e9)
    assert head_heavy.layout(3).sizes == (5, 6, 1)  # the head costs as much as six layers
    with pytest.raises(ValueError, match="pp_size=13 is more than the model's 12 layers"):
        head_heavy.layout(13)
    # Long documents make layers dearer, not the head.
    long = stage_costs(model, [100_000], hardware=UNIT, memory_bytes_per_second=1e9)
    assert long.layout(3).sizes == (4, 4, 4)


def test_stages_of_a_layout():
    costs = StageCosts((1.0, 2.0, 3.0), before=0.5, after=4.0, source="by hand")
    assert costs.per_stage(StageLayout((0, 2, 3))) == (3.5, 7.0)
    assert costs.per_stage(StageLayout((0, 3))) == (10.5,)
    with pytest.raises(ValueError, match="The layout is of 4 layers, but there are costs of 3"):
        costs.per_stage(StageLayout((0, 4)))


def test_the_default_lengths():
    for context_length in (1, 2, 3, 4, 5, 8191, 131_072):
        lengths = typical_lengths(context_length)
        assert sum(lengths) == context_length and max(lengths) - min(lengths) <= 1 and 1 <= len(lengths) <= 4
    given = stage_costs(config(), typical_lengths(4096))
    assert given == stage_costs(config(), context_length=4096) == stage_costs(config(), np.array([1024] * 4))
    assert given.source == "counted from the config for 'h100', documents of 1024, 1024, 1024, 1024 tokens"
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="context_length must be a whole number of at least 1"):
            typical_lengths(wrong)


def test_nested_text_configs_are_entered():
    assert stage_costs(SimpleNamespace(text_config=config()), [9]) == stage_costs(config(), [9])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Give either lengths or context_length .*; neither was given"),
        ({"lengths": [5], "context_length": 8}, "Give either lengths or context_length .*; both was given"),
        ({"lengths": []}, "lengths must be the lengths of one document at least"),
        ({"lengths": [0, 0]}, "lengths must be the lengths of one document at least"),
        ({"lengths": [[1, 2]]}, "lengths must be the lengths of one document at least"),
        ({"lengths": [-1]}, "document lengths must lie between 0"),
        ({"lengths": [5], "hardware": "abacus"}, "There are no hardware figures called 'abacus'"),
        ({"lengths": [5], "hardware": UNIT}, "How fast 'unit' moves memory is not known .* memory_bytes_per_second"),
        ({"lengths": [5], "memory_bytes_per_second": 0}, "memory_bytes_per_second must be above 0 and finite, but 0"),
        ({"lengths": [5], "tp_size": 3}, "tp_size must divide the 2 attention heads"),
    ],
)
def test_what_cannot_be_counted_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        stage_costs(config(), **arguments)


def test_families_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="this family is not known here"):
        stage_costs(config(model_type="mamba"), [5])
    assert stage_costs(config(model_type="new"), [5], gated_mlp=True) == stage_costs(config(), [5])


MEASURED = {"layers": [0.5, 0.25], "before": 0.0, "after": 1}


def test_measured_costs():
    costs = StageCosts.from_measurements(MEASURED, source="run 7")
    assert costs == StageCosts((0.5, 0.25), 0.0, 1.0, "run 7")
    assert type(costs.after) is float


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([1.0], r"The stage costs \(run 7\) must be an object"),
        ({"layers": [1.0], "before": 0.0}, r"missing are \['after'\], unknown are \[\]"),
        ({**MEASURED, "head": 1.0}, r"missing are \[\], unknown are \['head'\]"),
        ({**MEASURED, "layers": []}, "layers of the stage costs .run 7. must be a list of seconds"),
        ({**MEASURED, "layers": 0.5}, "layers of the stage costs .run 7. must be a list of seconds"),
        ({**MEASURED, "layers": "12"}, "layers of the stage costs .run 7. must be a list of seconds"),
        (
            {**MEASURED, "layers": [0.5, 0.0]},
            r"Layer 1 of the stage costs \(run 7\) must take above 0 seconds, but 0.0",
        ),
        ({**MEASURED, "layers": [0.5, True]}, "must hold numbers of seconds, but True"),
        ({**MEASURED, "before": None}, "must hold numbers of seconds, but None"),
        ({**MEASURED, "before": -0.5}, "what comes before the layers must be a finite number of at least 0, but -0.5"),
        ({**MEASURED, "after": float("nan")}, "what comes after the layers must be a finite number"),
        ({**MEASURED, "layers": [float("inf")]}, "The cost of layer 0 must be a finite number"),
    ],
)
def test_measurements_that_are_none_are_refused(data, words):
    with pytest.raises(ValueError, match=words):
        StageCosts.from_measurements(data, "run 7")


def test_costs_come_from_files(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(MEASURED))
    assert StageCosts.load(path) == StageCosts((0.5, 0.25), 0.0, 1.0, f"in {path}")
    named = StageCosts.from_measurements(MEASURED, "run 7")
    path.write_text(json.dumps({**named.to_dict(), "analysis": {"anything": 1}}))
    assert StageCosts.load(str(path)) == named


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", r"The stage costs \(in .*costs.json\) must be an object"),
        ("{", "The stage costs .*costs.json is no JSON file"),
        ('{"schema": "hf_wlb.analytic/1"}', "costs.json must be of schema 'hf_wlb.stage_costs/1', not 'hf_wlb.analyt"),
        ('{"layers": [1.0], "before": 0.0}', r"costs.json\) need exactly the keys .*missing are \['after'\]"),
        (
            '{"layers": [0], "before": 0, "after": 1}',
            r"Layer 0 of the stage costs \(in .*costs.json\) must take above 0",
        ),
    ],
)
def test_files_that_hold_no_costs_are_refused(tmp_path, text, words):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        StageCosts.load(path)
    with pytest.raises(FileNotFoundError, match="There is no stage costs file"):
        StageCosts.load(tmp_path / "nowhere.json")


def test_costs_need_a_layer():
    with pytest.raises(ValueError, match="the cost of one layer at least, but layers is empty"):
        StageCosts((), 0.0, 0.0, "by hand")
