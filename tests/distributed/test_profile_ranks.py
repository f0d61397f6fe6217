"""``hf-wlb profile`` as several processes: one profile, the same for all, that context parallelism is priced by."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_wlb.sharding import ShardCosts, Sharder, ShardingConfig
from hf_wlb.workload import ProfiledWorkload, load_workload
from tests.support.spawn import RankError, run_distributed

CPU = torch.device("cpu")


def run_command(rank: int, world_size: int, file: str) -> tuple[int, str, str]:
    from typer.testing import CliRunner

    from hf_wlb.cli import app

    options = ["--quick", "--device", "cpu", "--dtype", "float32", "--json", file if rank == 0 else f"{file}.{rank}"]
    result = CliRunner().invoke(app, ["profile", "--model", "tiny", *options], env={"COLUMNS": "80"})
    return result.exit_code, result.stdout, result.stderr


def measure(rank: int, world_size: int, tp_size: int, time_collectives: str | None = None) -> Any:
    from hf_wlb.parallel.collective_times import time_collectives as timed
    from hf_wlb.presets import preset_config
    from hf_wlb.profiling import ProfileOptions, measure_profile

    if time_collectives is not None:
        return timed([64], lambda run, meet: 1.0, CPU, operations=[time_collectives])
    config = preset_config("tiny")
    return measure_profile(config, CPU, ProfileOptions(quick=True, dtype=torch.float32, tp_size=tp_size))


def test_the_first_process_writes_what_all_have_measured(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    first, second = run_distributed(run_command, 2, str(file))
    assert first[0] == second[0] == 0, (first, second)
    assert "Links" in first[1] and not second[1]
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    workload = load_workload(file)
    assert isinstance(workload, ProfiledWorkload)
    operations = ["all_gather", "all_reduce", "key_value_exchange", "reduce_scatter", "send_recv"]
    assert sorted({sample[0] for sample in workload.profile.collectives}) == operations
    assert {sample[1] for sample in workload.profile.collectives} == {2}
    shapes = [(q, k) for q, k, *_ in workload.profile.attention]
    assert len(shapes) == len(set(shapes)) > 8
    # The adaptive choice prices its plans by it.
    lengths = np.array([400, 90, 60, 50])
    plan = Sharder(ShardingConfig(2, "adaptive"), workload).plan(lengths)
    assert np.isfinite(plan.predicted).all() and plan.predicted.min() > 0
    assert ShardCosts.of(lengths, workload, 2).exchange(400) > 0
    with pytest.raises(ValueError, match="no time of all_gather over 4 ranks"):
        Sharder(ShardingConfig(4, "per_document"), workload).plan(lengths)
    assert json.loads(file.read_text())["metadata"]["processes"] == 2


def test_ranks_that_share_matrices_have_half_of_everything() -> None:
    first, second = run_distributed(measure, 2, 2)
    assert first == second
    model = first["metadata"]["model"]
    assert (model["tp_size"], model["heads"], model["kv_heads"], model["kv_width"]) == (2, 2, 1, 32)
    assert ProfiledWorkload.from_dict(first).linear(100) > 0


def test_an_operation_that_cannot_be_timed_is_refused() -> None:
    samples = run_distributed(measure, 2, 1, "send_recv")
    assert samples == [[{"operation": "send_recv", "group_size": 2, "bytes": 64, "seconds": 1.0}]] * 2
    with pytest.raises(RankError, match=r"operations must be of all_gather, .*, got 'broadcast'"):
        run_distributed(measure, 2, 1, "broadcast")
