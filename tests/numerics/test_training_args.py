"""WLBTrainingArguments: every refusal is a sentence, and the settings reach planner and workload model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_wlb import AnalyticWorkload, WLBTrainingArguments
from hf_wlb.argument_names import as_arguments, named_as_arguments
from hf_wlb.packing import PackingConfig
from hf_wlb.parallel import ParallelSizes
from hf_wlb.sharding import ShardingConfig
from tests.support.tiny_llama import tiny_llama


def arguments(folder: Path, **options: Any) -> WLBTrainingArguments:
    return WLBTrainingArguments(
        output_dir=str(folder), **{"context_length": 64, "use_cpu": True, "report_to": "none", **options}
    )


def test_the_defaults_are_a_planner_of_one_micro_batch(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    assert (given.per_device_train_batch_size, given.per_device_eval_batch_size) == (1, 1)
    config = given.packing_config(2)
    assert (config.context_length, config.s_max, config.packer) == (64, 80, "steady")
    assert (config.dp_size, config.pp_size, config.micro_batches_per_replica) == (2, 1, 1)
    assert given.shuffle_documents


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no context": ({"context_length": None}, "context_length is missing: .*for example context_length=8192"),
    "context 0": ({"context_length": 0}, "context_length must be a whole number of at least 1, got 0"),
    "accumulation": (
        {"gradient_accumulation_steps": 0},
        "^gradient_accumulation_steps must be a whole number of at least 1, got 0",
    ),
    "train rows": (
        {"per_device_train_batch_size": 2},
        "per_device_train_batch_size=2: .*must be 1. Use context_length and gradient_accumulation_steps",
    ),
    "eval rows": ({"per_device_eval_batch_size": 8}, "per_device_eval_batch_size=8: .*must be 1"),
    "by length": (
        {"train_sampling_strategy": "group_by_length"},
        "train_sampling_strategy='group_by_length': the step planner decides.*shuffle_documents=False",
    ),
    "drop last": ({"dataloader_drop_last": True}, "dataloader_drop_last would lose documents"),
    "find size": ({"auto_find_batch_size": True}, "auto_find_batch_size cannot change planned micro-batches"),
    "tokens of a rank": (
        {"average_tokens_across_devices": False},
        "average_tokens_across_devices=False would weigh tokens by the rank",
    ),
    "two workloads": (
        {"workload_crossover": 100.0, "workload_hardware": "h100"},
        "at most one of workload_profile, workload_crossover and workload_hardware",
    ),
    "packer": ({"packer": "clever"}, "unknown packer 'clever'; choose one of steady, wlb"),
    "oversize": (
        {"oversize_documents": "drop"},
        "^oversize_documents must be one of split, truncate, error, got 'drop'",
    ),
    "empty": ({"empty_documents": "keep"}, "^empty_documents must be one of error, skip, got 'keep'"),
    "S_max": ({"max_tokens_per_micro_batch": 32}, "max_tokens_per_micro_batch=32 is below context_length=64"),
    "document": ({"max_document_tokens": 81}, "max_document_tokens=81 must lie between 1 and the 80 tokens"),
    "thresholds": ({"outlier_thresholds": [32, 16]}, r"^outlier_thresholds must ascend strictly, got \[32, 16\]"),
    "outliers": ({"outlier_tokens": 0}, "outlier_tokens must be at least 1"),
    "gap": ({"max_time_gap": -0.1}, "max_time_gap must not be negative"),
    "wait": ({"max_wait_steps": 0}, "max_wait_steps must be at least 1"),
    "contexts": ({"max_waiting_contexts": 0.0}, "max_waiting_contexts must be positive"),
    "window": ({"window_steps": 0}, "window_steps must be a whole number of at least 1"),
    "cp": ({"cp_size": 0}, "cp_size must be a whole number of at least 1, got 0"),
    "tp": ({"tp_size": 0}, "tp_size must be a whole number of at least 1, got 0"),
    "loss": ({"fused_loss": "magic"}, "fused_loss must be one of auto, chunked, liger, off, got 'magic'"),
    "two losses": ({"use_liger_kernel": True}, "use_liger_kernel would compute the loss a second way"),
    "strategy": ({"cp_strategy": "ring"}, "^cp_strategy must be one of per_sequence, per_document, .*got 'ring'"),
    "cp threshold": ({"cp_threshold": 8}, "^cp_threshold is for cp_strategy='placed', but the cp_strategy is 'ad"),
    "skew": ({"cp_max_token_skew": 1.0}, "^cp_max_token_skew must be at least 0 and below 1"),
    "shard": (
        {"cp_size": 2, "max_tokens_per_shard": 39},
        r"micro-batches of up to 80 tokens \(S_max\) do not fit cp_size=2 processes of at most max_tokens_per_shard=39",
    ),
    "kernel": ({"attention_kernel": "magic"}, "attention_kernel must be one of auto, .*reference, got 'magic'"),
    "head groups": ({"kv_head_groups": 0}, "kv_head_groups must be at least 1 or None, got 0"),
    "stages to plan for": ({"plan_pp_size": 0}, "pp_size must be a whole number of at least 1"),
    "stages": ({"pp_size": 0}, "^pp_size must be a whole number of at least 1, got 0"),
    "another pipeline": (
        {"pp_size": 4, "plan_pp_size": 2},
        "plan_pp_size=2 plans for fewer stages than there are",
    ),
    "layers without stages": (
        {"pp_stage_layers": [1, 1]},
        r"pp_stage_layers=\[1, 1\] says what pipeline stages hold, but pp_size=1. Set pp_size, or leave it out",
    ),
    "layers of other stages": (
        {"pp_size": 4, "pp_stage_layers": [1, 1]},
        r"pp_stage_layers=\[1, 1\] names 2 stages, but pp_size=4; give one number of layers a stage",
    ),
    "an empty stage": (
        {"pp_size": 2, "pp_stage_layers": [0, 1]},
        r"pp_stage_layers=\[0, 1\] leaves stage 0 empty; every stage needs one layer at least",
    ),
    "fewer layers than none": (
        {"pp_size": 2, "pp_stage_layers": [3, -1]},
        "must hold whole numbers of at least 1, but stage 1 has -1",
    ),
    "one number of layers": (
        {"pp_size": 2, "pp_stage_layers": 4},
        "pp_stage_layers must be a list of whole numbers, one a stage, got 4",
    ),
    "system": ({"system": "3d"}, "system must be one of wlb, plain-4d, fixed-4d, got '3d'"),
    "another system's packer": (
        {"system": "plain-4d", "packer": "greedy"},
        r"packer='greedy' contradicts system='plain-4d', which is made by its packer \(next-fit\). Leave one of them",
    ),
    "a packer that is no system": (
        {"system": "wlb", "packer": "next-fit"},
        r"packer='next-fit' contradicts system='wlb', which is made by its packer \(steady or wlb\)",
    ),
    "our packer in another system": (
        {"system": "fixed-4d", "packer": "steady"},
        r"packer='steady' contradicts system='fixed-4d', which is made by its packer \(greedy\)",
    ),
    "a threshold that the system does not use": (
        {"system": "fixed-4d", "cp_threshold": 8},
        "^cp_threshold is for cp_strategy='placed', but the cp_strategy is 'per_document'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path) -> None:
    options, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        arguments(tmp_path, **options)


def test_only_names_of_settings_are_changed() -> None:
    sentence = "^/runs/empty/x: cp_threshold='empty', cp_strategy and outlier_thresholds are"
    with pytest.raises(ValueError, match=sentence), named_as_arguments():
        raise ValueError("/runs/empty/x: threshold='empty', strategy and thresholds are wrong")
    with pytest.raises(KeyError, match="threshold"), named_as_arguments():
        raise KeyError("threshold")


def test_deepspeed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own set-up, which wants its library, is left out.
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
    with pytest.raises(ValueError, match="deepspeed is not supported by WLBTrainer: to share out parameters set fsdp"):
        arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 1}})


@pytest.mark.parametrize("given", [True, "full_shard auto_wrap"])
def test_fsdp_is_ours_and_not_accelerates(given: Any, tmp_path: Path) -> None:
    config = {"fsdp_reshard_after_forward": "false", "version": 2, "transformer_layer_cls_to_wrap": "Layer"}
    args = arguments(tmp_path, fsdp=given, fsdp_config=config)
    assert args.shard_parameters
    assert args.fsdp_plugin_args is None
    assert args.parallel_sizes(8) == ParallelSizes(dp_shard=8)
    assert args.fsdp_config["transformer_layer_cls_to_wrap"] == ["Layer"]
    assert not arguments(tmp_path, tp_size=2).shard_parameters
    assert arguments(tmp_path, dp_shard_size=2, tp_size=2).parallel_sizes(8) == ParallelSizes(2, 1, 2, 1, 2)
    assert arguments(tmp_path, fsdp=True, cp_size=4).parallel_sizes(4) == ParallelSizes(cp=4)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"version": 1}, r"fsdp_config\['version'\]=1 is not supported.*It takes reshard_after_forward"),
        ({"activation_checkpointing": True}, "leave the others out and set activation_checkpointing=True"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "SIZE_BASED_WRAP"),
        ({"no_such_option": 3}, "no_such_option"),
    ],
)
def test_what_our_fsdp_does_not_do_is_refused(config: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        arguments(tmp_path, fsdp=True, fsdp_config=config)


def test_every_setting_reaches_the_planner(tmp_path: Path) -> None:
    config = arguments(
        tmp_path,
        gradient_accumulation_steps=3,
        packer="wlb",
        max_tokens_per_micro_batch=100,
        max_document_tokens=90,
        oversize_documents="truncate",
        empty_documents="skip",
        outlier_thresholds=[10, 40],
        outlier_tokens=12,
        max_time_gap=0.5,
        max_wait_steps=7,
        max_waiting_contexts=4.0,
        window_steps=2,
        plan_pp_size=4,
    ).packing_config(5)
    expected = {
        "context_length": 64,
        "micro_batches_per_replica": 3,
        "dp_size": 5,
        "pp_size": 4,
        "packer": "wlb",
        "max_tokens_per_micro_batch": 100,
        "max_document_tokens": 90,
        "oversize": "truncate",
        "empty": "skip",
        "thresholds": [10, 40],
        "outlier_tokens": 12,
        "max_time_gap": 0.5,
        "max_wait_steps": 7,
        "max_waiting_contexts": 4.0,
        "window_steps": 2,
    }
    found = config.to_dict()
    assert {name: found[name] for name in expected} == expected


def test_every_setting_reaches_the_sharder(tmp_path: Path) -> None:
    given = arguments(
        tmp_path,
        cp_size=4,
        cp_strategy="placed",
        cp_threshold=12,
        max_tokens_per_shard=20,
        cp_max_token_skew=0.1,
        attention_kernel="auto",
    )
    assert given.sharding_config() == ShardingConfig(4, "placed", 12, 20, 0.1)
    assert given.attention_kernel is None and given.regather_key_values is None
    assert arguments(tmp_path).sharding_config() == ShardingConfig(1)
    assert given.packing_config(2) == arguments(tmp_path).packing_config(2)  # S_max is of all ranks together


def test_replicas_that_share_parameters_are_packed_for_meeting_at_every_micro_batch(tmp_path: Path) -> None:
    whole, shared = arguments(tmp_path), arguments(tmp_path, fsdp=True)
    assert not whole.packing_config(2).sharded_parameters and not whole.packing_config(2).step_time.lockstep
    for given in (shared, arguments(tmp_path, dp_shard_size=2)):
        assert given.packing_config(2) == replace(whole.packing_config(2), sharded_parameters=True)
        assert given.packing_config(2).step_time.lockstep
    assert not shared.packing_config(1).step_time.lockstep  # one replica, whose context-parallel ranks share
    staged = arguments(tmp_path, fsdp=True, pp_size=2).packing_config(2)
    assert staged.sharded_parameters and not staged.step_time.lockstep  # stages keep theirs for the whole step


SYSTEMS: dict[str, tuple[dict[str, Any], tuple[str, str, int, int]]] = {
    "none": ({}, ("steady", "adaptive", 80, 1)),
    "ours": ({"system": "wlb"}, ("steady", "adaptive", 80, 1)),
    "ours, the paper's packer": ({"system": "wlb", "packer": "wlb"}, ("wlb", "adaptive", 80, 1)),
    "plain": ({"system": "plain-4d"}, ("next-fit", "per_sequence", 64, 1)),
    "plain, our sharding": ({"system": "plain-4d", "cp_strategy": "adaptive"}, ("next-fit", "adaptive", 64, 1)),
    "plain, said twice": ({"system": "plain-4d", "packer": "next-fit"}, ("next-fit", "per_sequence", 64, 1)),
    "fixed": ({"system": "fixed-4d"}, ("greedy", "per_document", 64, 1)),
    "fixed, the other sharding": (
        {"system": "fixed-4d", "cp_strategy": "per_sequence", "window_steps": 2},
        ("greedy", "per_sequence", 64, 2),
    ),
}


@pytest.mark.parametrize("case", SYSTEMS)
def test_a_system_decides_what_is_not_given(case: str, tmp_path: Path) -> None:
    options, expected = SYSTEMS[case]
    given = arguments(tmp_path, cp_size=2, **options)
    packing = given.packing_config(2)
    assert (packing.packer, given.sharding_config().strategy, packing.capacity, packing.window_steps) == expected
    assert packing.longest_document == packing.capacity and given.shuffle_documents
    written = {name: getattr(given, name) for name in ("system", "packer", "cp_strategy", "cp_size", "window_steps")}
    assert arguments(tmp_path, **written).packing_config(2) == packing


def test_a_system_by_plain_arguments_and_command_line(tmp_path: Path) -> None:
    plain = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    made = WLBTrainingArguments.from_plain(plain, context_length=64, system="fixed-4d")
    assert made.packing_config(1) == arguments(tmp_path, system="fixed-4d").packing_config(1)
    assert made.cp_strategy == "per_document"
    assert WLBTrainingArguments.from_plain(plain, context_length=64).packing_config(1).packer == "steady"
    with pytest.raises(ValueError, match="contradicts system='plain-4d'"):
        WLBTrainingArguments.from_plain(plain, context_length=64, system="plain-4d", packer="wlb")
    (parsed,) = HfArgumentParser(WLBTrainingArguments).parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --context_length 64 --system plain-4d --cp_size 2 --use_cpu".split()
    )
    assert (parsed.packer, parsed.sharding_config().strategy) == ("next-fit", "per_sequence")


def test_stages_and_their_layers(tmp_path: Path) -> None:
    (parsed,) = HfArgumentParser(WLBTrainingArguments).parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --context_length 64 --pp_size 4 --pp_stage_layers 9 8 8 7 --use_cpu".split()
    )
    assert (parsed.pp_size, parsed.pp_stage_layers) == (4, [9, 8, 8, 7])
    assert parsed.packing_config(2).pp_size == 4  # without plan_pp_size
    assert parsed.parallel_sizes(8) == ParallelSizes(dp_replicate=2, pp=4)
    assert arguments(tmp_path, pp_size=2, plan_pp_size=2).packing_config(1).pp_size == 2
    assert arguments(tmp_path, pp_size=2, plan_pp_size=4).packing_config(1).pp_size == 4  # as for a longer pipeline
    sharded = arguments(tmp_path, pp_size=2, cp_size=2, fsdp=True).parallel_sizes(16)
    assert sharded == ParallelSizes(pp=2, dp_shard=4, cp=2)
    with pytest.raises(ValueError, match="pp_size=3 does not divide the 8 processes"):
        arguments(tmp_path, pp_size=3).parallel_sizes(8)


def test_a_parallelism_of_accelerate_is_refused(tmp_path: Path) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    with pytest.raises(ValueError, match=r"parallelism_config is not supported .*Set dp_replicate_size"):
        arguments(tmp_path, parallelism_config=ParallelismConfig())


def test_checkpoints_by_a_processs_own_clock_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"enable_jit_checkpoint is not supported .*Use save_steps"):
        arguments(tmp_path, enable_jit_checkpoint=True)


def test_noise_that_depends_on_the_packing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neftune_noise_alpha is not supported .*Leave it unset"):
        arguments(tmp_path, neftune_noise_alpha=5.0)
    arguments(tmp_path, neftune_noise_alpha=None)


def test_the_workload_comes_from_where_it_is_said(tmp_path: Path) -> None:
    model = tiny_llama()
    crossover = arguments(tmp_path, workload_crossover=24.0).workload_model(model.config)
    by_hand = AnalyticWorkload.from_crossover(24.0)
    assert [crossover.document(n) for n in (1, 24, 100)] == [by_hand.document(n) for n in (1, 24, 100)]
    default = arguments(tmp_path).workload_model(model.config)
    cpu = arguments(tmp_path, workload_hardware="cpu").workload_model(model.config)
    h100 = arguments(tmp_path, workload_hardware="h100").workload_model(model.config)
    assert default.document(100) == cpu.document(100) != h100.document(100)
    replayed = arguments(tmp_path, activation_checkpointing=True).workload_model(model.config)
    assert replayed.document(100) > default.document(100)


def test_a_model_that_cannot_be_costed_is_referred_to_the_crossover(tmp_path: Path) -> None:
    from transformers import PretrainedConfig

    with pytest.raises(ValueError, match="Or give workload_crossover, the length at which attention costs as much"):
        arguments(tmp_path).workload_model(PretrainedConfig())


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=r"nowhere\.json"):
        arguments(tmp_path, workload_profile=str(tmp_path / "nowhere.json")).workload_model(None)


def test_command_line_and_json(tmp_path: Path) -> None:
    parser = HfArgumentParser(WLBTrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --context_length 64 --outlier_thresholds 8 32 --packer wlb --max_time_gap 0.1 "
        "--shuffle_documents False --use_cpu --report_to none".split()
    )
    assert parsed.packing_config(1).thresholds == (8, 32)
    assert parsed.max_time_gap == 0.1 and parsed.shuffle_documents is False
    copied = json.loads(json.dumps(arguments(tmp_path, packer="wlb", outlier_thresholds=[8, 32]).to_dict()))
    assert copied["context_length"] == 64 and copied["outlier_thresholds"] == [8, 32]


def test_plans_do_not_depend_on_the_rank(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    assert given.packing_config(2) == given.packing_config(2)
    assert given.packing_config(2).tokens_per_step == 2 * given.packing_config(1).tokens_per_step


def test_a_profile_must_know_what_is_exchanged_and_how_layers_ran(tmp_path: Path, caplog: Any) -> None:
    from tests.support.simulated import profile

    file = tmp_path / "profile.json"
    profile(collectives=None).save(file)
    with pytest.raises(ValueError, match=r"cp_size=2 exchanges\..* torchrun --nproc_per_node 2 -m hf_wlb\.cli profile"):
        arguments(tmp_path, workload_profile=str(file), cp_size=2).workload_model(None)
    assert arguments(tmp_path, workload_profile=str(file)).workload_model(None) == profile(collectives=None)
    assert not caplog.records
    arguments(tmp_path, workload_profile=str(file), torch_compile=True).workload_model(None)
    assert "is a profile of layers without torch_compile, but this run has torch_compile=True" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packer": "greedy", "max_tokens_per_micro_batch": 128}, ["max_tokens_per_micro_batch=128", "steady or wlb"]),
        ({"outlier_thresholds": [4, 8]}, ["outlier_thresholds=[4, 8] is for packer wlb: steady does not"]),
        ({"packer": "wlb", "max_wait_steps": 3}, ["max_wait_steps=3 is for packer steady: wlb does not"]),
        ({"packer": "next-fit", "window_steps": 2}, ["window_steps=2 is for packer greedy: next-fit does not"]),
        ({"packer": "wlb", "outlier_thresholds": [4, 8]}, []),
        ({"max_wait_steps": 3, "max_tokens_per_micro_batch": 128}, []),
    ],
)
def test_options_that_the_packer_does_not_look_at_are_said(
    options: Any, said: list[str], tmp_path: Path, caplog: Any
) -> None:
    arguments(tmp_path, **options)
    assert all(sentence in caplog.text for sentence in said)
    assert len(caplog.records) == bool(said)


@pytest.mark.parametrize(
    "config",
    [
        PackingConfig(64, 2, max_time_gap=0.05, max_waiting_contexts=5.0, max_wait_steps=7, outlier_tokens=9),
        PackingConfig(64, 3, packer="wlb", thresholds=(16, 32), max_tokens_per_micro_batch=96, max_document_tokens=64),
        PackingConfig(64, 2, packer="greedy", window_steps=4, oversize="truncate", empty="skip"),
    ],
)
def test_settings_are_written_as_the_arguments_that_make_them(config: PackingConfig, tmp_path: Path) -> None:
    args = WLBTrainingArguments(str(tmp_path), use_cpu=True, **as_arguments(config))
    made = args.packing_config(1)
    assert replace(made, max_tokens_per_micro_batch=made.s_max) == replace(
        config, max_tokens_per_micro_batch=config.s_max
    )
