"""A launch of the end-to-end benchmark as its results file has it, without anything having been measured."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.lengths import sample_lengths
from hf_wlb.simulator.paper import shape_of
from hf_wlb.workload import AnalyticWorkload


def documents() -> NDArray[np.int64]:
    """Lengths that it trains on, in the order of a file of them."""
    return sample_lengths(5_000, seed=1) // 8


def made_up_launch(cases: ModuleType, prices: ModuleType, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A launch and its steps as the benchmark writes them, all taking a second: PP2 CP2, 16K, seven layers of 7B."""
    settings = cases.Settings(
        *("7B", 7, 16 * cases.K),
        micro_batches=4,
        pp_size=2,
        cp_size=2,
        warm_steps=3,
        window_steps=rounds + 1,
        lengths="made up",
    )
    shape = shape_of(settings.model)
    shape.num_hidden_layers = settings.layers
    workload = AnalyticWorkload.from_config(shape, "h100-flash-attn-4", gradient_checkpointing=True)
    variants, same = cases.chosen_variants(settings.cp_size, names)
    given = cases.documents(documents(), settings, 1)
    about = {
        "kind": "launch",
        "launch": "made up",
        "settings": asdict(settings),
        "kernel": "flash-attn-4",
        "devices": 4,
        "replicas": 1,
        "stage_layers": [4, 3],
        "workload": workload.to_dict(),
        "same_as": same,
    }
    priced = prices.StepPrices.of(about)
    found = cases.streams(variants, given, settings, 1, workload, priced.of_sharding)
    about["streams"] = {stream.variant.name: stream.figures() for stream in found}
    steps = [
        {
            "kind": "step",
            "launch": "made up",
            "variant": turn.variant,
            "round": turn.round,
            "step": turn.step.plan.step,
            "seconds": 1.0,
            "predicted": turn.predicted,
            "micro_batch_lengths": [[cases.lengths_of(m) for m in replica] for replica in turn.step.plan.replicas],
        }
        for turn in cases.turns(found, 0, rounds, 1, seed=0)
    ]
    return json.loads(json.dumps([about, *steps]))


def text_of(lines: list[dict[str, Any]]) -> str:
    """A results file."""
    return "".join(json.dumps(line) + "\n" for line in lines)
