"""What planning and data loading take of a rank's host memory."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np

from tests.support.source_tree import REPOSITORY

GIB = 2**30
SCRIPT = """
import json, sys, psutil, datasets, hf_wlb.trainer
from hf_wlb import AnalyticWorkload, PackingConfig, WLBDataCollator, WLBDataLoader
from hf_wlb.sharding import Sharder, ShardingConfig

def resident():  # of all processes together, shared pages counted once
    return sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True)))

process = psutil.Process()
before = peak = resident()
workload = AnalyticWorkload.from_crossover(24_000)
loader = WLBDataLoader(
    datasets.concatenate_datasets([datasets.load_from_disk(sys.argv[1])] * 100),
    PackingConfig(context_length=131_072, micro_batches_per_replica=8, dp_size=8, pp_size=1),
    workload,
    collator=WLBDataCollator(sharder=Sharder(ShardingConfig(cp_size=4), workload)),
    num_workers=2,
    prefetch_factor=2,
)
for number, _ in zip(range(16), loader):
    peak, workers = max(peak, resident()), len(process.children(recursive=True))
print(json.dumps({"before": before, "peak": peak, "workers": workers, "documents": len(loader.dataset)}))
"""


def test_planner_and_workers_stay_within_a_gibibyte(tmp_path: Path) -> None:
    """A million documents, micro-batches of 128K tokens, two workers."""
    lengths = np.random.default_rng(0).lognormal(6.0, 1.5, 10_000).astype(np.int64).clip(1, 131_072)
    ids = [np.arange(length, dtype=np.int32) for length in lengths]
    datasets.Dataset.from_dict({"input_ids": ids, "length": lengths}).save_to_disk(str(tmp_path / "rows"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "rows")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["workers"], found["documents"]) == (2, 1_000_000)
    assert 0 < found["peak"] - found["before"] < GIB, found
