"""All four kinds of parallelism at once, on 8 and 16 processes: ``make test-many`` runs these.

pytest -m many_ranks
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_pipeline_trainer import deep, stages_of, whole
from tests.support.equivalence import MICRO_BATCHES, Outcome, check, prepared, replicas, run
from tests.support.scripts import run_script
from tests.support.spawn import run_distributed
from tests.support.tolerances import NEGATIVE_CONTROL_FACTOR, PIPELINES

pytestmark = pytest.mark.many_ranks

STEPS = 5
FOUR_D: dict[str, Any] = {"pp_size": 2, "cp_size": 2, "tp_size": 2}
FAMILIES = ("llama", "gemma3")
RECIPE_LOSS = 1e-4


def runs(rank: int, world_size: int, folder: str, families: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for family in families:
        options = {**FOUR_D, "max_steps": STEPS}
        trainer, steps = prepared(folder, deep(family), replicas(world_size, FOUR_D), options)
        trainer.train()
        found[family] = stages_of(rank, trainer, steps)
    return found


@pytest.fixture(scope="module")
def single(tmp_path_factory: Any) -> Any:
    @functools.cache
    def ask(family: str) -> Outcome:
        options = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES}
        return run(str(tmp_path_factory.mktemp("single")), deep(family), 1, **options)

    return ask


@pytest.mark.parametrize(("ranks", "families"), [(8, FAMILIES), (16, FAMILIES[:1])])
def test_all_kinds_of_parallelism_train_as_one_process(
    ranks: int, families: tuple[str, ...], single: Any, tmp_path: Path
) -> None:
    found = run_distributed(runs, ranks, str(tmp_path), families, timeout_s=900)
    for family in families:
        merged = whole([of for rank in found if (of := rank[family]) is not None])
        check(merged, single(family), f"{ranks} ranks, {family}", PIPELINES)
    merged.gradients[0] = {name: 1.001 * gradient for name, gradient in merged.gradients[0].items()}
    assert max(merged.differences(single(families[-1])).values()) > NEGATIVE_CONTROL_FACTOR * PIPELINES


def recipe(output: Path, processes: int | None, *options: str) -> list[float]:
    """Losses of the long-context recipe's demonstration, a few steps of it."""
    arguments = ["--use_cpu", "--max_steps", "3", "--max_documents", "120", "--vocab_size", "512", "--disable_tqdm"]
    arguments += ["True", "--save_strategy", "no", "--context_length", "1024", "--max_document_tokens", "1024"]
    arguments += [*options, "--output_dir", str(output)]
    done = run_script("recipes/llama_long_context.py", *arguments, processes=processes, timeout_s=900)
    assert done.returncode == 0, done.stderr[-5000:]
    logs = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [log["loss"] for log in logs if "loss" in log]


def test_the_recipe_on_eight_ranks(tmp_path: Path) -> None:
    split = [word for name, size in FOUR_D.items() for word in (f"--{name}", str(size))]
    found = recipe(tmp_path / "eight", 8, *split)
    expected = recipe(tmp_path / "one", None, "--plan_pp_size", "2")  # plans as the eight do
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=RECIPE_LOSS)
