"""The mesh's sizes, and what Accelerate sees of them."""

from typing import Any

import pytest
from accelerate import ParallelismConfig

from hf_wlb.parallel import ParallelSizes, WLBParallelismConfig, check_launcher


@pytest.mark.parametrize(
    ("processes", "given", "expected"),
    [
        (1, {}, ParallelSizes()),
        (8, {}, ParallelSizes(dp_replicate=8)),
        (8, {"shard_all": True}, ParallelSizes(dp_shard=8)),
        (8, {"cp_size": 2, "shard_all": True}, ParallelSizes(dp_shard=4, cp=2)),
        (8, {"cp_size": 4, "shard_all": True, "dp_shard_size": 1}, ParallelSizes(dp_replicate=2, cp=4)),
        (8, {"dp_replicate_size": 2, "shard_all": True}, ParallelSizes(dp_replicate=2, dp_shard=4)),
        (8, {"dp_shard_size": 2, "tp_size": 2}, ParallelSizes(dp_replicate=2, dp_shard=2, tp=2)),
        (8, {"cp_size": 2, "tp_size": 2, "pp_size": 2}, ParallelSizes(pp=2, cp=2, tp=2)),
    ],
)
def test_data_parallelism_takes_what_is_left(processes: int, given: Any, expected: ParallelSizes) -> None:
    sizes = ParallelSizes.of(processes, **given)
    assert sizes == expected
    assert sizes.total == processes


@pytest.mark.parametrize(
    ("processes", "given", "sentence"),
    [
        (4, {"cp_size": 3}, "cp_size=3 does not divide the 4 processes; set it to 1, 2 or 4, or start another"),
        (4, {"cp_size": 2, "tp_size": 4}, "cp_size=2 x tp_size=4 is 8, which does not divide the 4 processes; their"),
        (1, {"tp_size": 2}, r"start 2 of them.*torchrun --nproc_per_node 2\), or set tp_size=1"),
        (1, {"cp_size": 2, "tp_size": 2}, "start 4 of them.*or set cp_size=1 and tp_size=1"),
        (4, {"dp_replicate_size": 2}, "dp_replicate_size=2 x .* is 2, but 4 processes run. Leave dp_replicate_size"),
        (4, {"dp_replicate_size": 1, "dp_shard_size": 2}, "is 2, but 4 processes run"),
        (4, {"tp_size": 0}, "tp_size must be a whole number of at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes(processes: int, given: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ParallelSizes.of(processes, **given)


def test_accelerate_sees_nothing_to_do_but_all_axes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")  # not read
    config = WLBParallelismConfig(sizes=ParallelSizes(dp_shard=2, cp=2, tp=2))
    assert isinstance(config, ParallelismConfig)
    assert not (config.cp_enabled or config.tp_enabled or config.sp_enabled or config.dp_shard_enabled)
    assert (config.cp_size, config.tp_size, config.pp_size) == (1, 1, 1)
    assert config.active_mesh_dims == ["dp_shard", "cp", "tp"]
    assert (config.total_size, config.data_parallel_size) == (8, 2)
    assert repr(config) == "WLBParallelismConfig(dp_shard 2 x cp 2 x tp 2)"


def test_upstreams_own_would_act() -> None:
    """Why there is a subclass: this is what it has to keep away."""
    config = ParallelismConfig(cp_size=2)
    assert config.cp_enabled
    with pytest.raises(ValueError, match="cannot be used with pure data parallelism"):
        ParallelismConfig(cp_size=2, dp_replicate_size=2)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"PARALLELISM_CONFIG_CP_SIZE": "4"}, r"says cp_size=4 \(PARALLELISM_CONFIG_CP_SIZE\), but .* say 2"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "says tp_size=2"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, "says sp_size=2"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "says dp_shard_size=2"),
        ({"ACCELERATE_USE_FSDP": "true"}, r"switches FSDP on \(ACCELERATE_USE_FSDP\); set fsdp=True or dp_shard_size"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "switches DeepSpeed on"),
    ],
)
def test_a_launcher_that_wants_something_else_is_refused(environment: dict[str, str], sentence: str) -> None:
    sizes = ParallelSizes(dp_replicate=4, cp=2)
    with pytest.raises(ValueError, match=sentence):
        check_launcher(sizes, environment)
    check_launcher(sizes, {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"})
    check_launcher(sizes, {"ACCELERATE_USE_FSDP": "false"})
