"""The trainer's benchmark: its table, and which of its runs are compared with each other."""

from types import SimpleNamespace

import pytest

from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(trainer_report=__import__("trainer_report"))


def trainer_run(devices: int, loss: float | None, mfu: float, **options) -> dict:
    """Four steps of 1,000 tokens, each 2 seconds on the devices together; the first one is not counted."""
    rows = [
        {"tokens_per_step": 1000, "tokens_per_second_per_gpu": 500 / devices, "mfu": mfu, "rank_imbalance": 1.25}
        for _ in range(4)
    ]
    if loss is not None:
        rows = [{**row, "loss": loss - number / 8} for number, row in enumerate(rows)]
    machine = {"device": "NVIDIA H100", "devices": devices, "attention_kernel": "flash-attn-2"}
    machine |= {"peak_memory_gib": 61.4, "versions": {"torch": "2.11"}}
    return {"options": options, "processes": devices, "seconds": 60.0, "steps": rows, "machine": machine}


def trainer_results(modules, runs: dict) -> dict:
    """As ``trainer.py`` writes them."""
    settings = {"model": "1B", "context_length": 65536, "micro_batches": 4, "steps": 4, "warmups": 1}
    machine = next((run["machine"] for run in runs.values() if "machine" in run), {})
    about = {"date": "2026-12-01", "commit": "abc", "lengths": "`x`", "machine": machine}
    result = modules.trainer_report.result(runs, 1)
    return {"settings": settings, "environment": about, "runs": runs, "result": result}


def overhead_run() -> dict:
    """On one GPU, steps of the trainer 2% longer."""
    run = trainer_run(1, None, 0.0)
    return {**run, "steps": [{"trainer_seconds": 1.02, "bare_seconds": 1.0}] * 4}


def two_gpus(modules) -> dict:
    """Runs of ``trainer.py --gpus 2``."""
    return {
        "overhead": overhead_run(),
        "cp2": trainer_run(2, 9.0, 0.45, cp_size="2", torch_compile="True"),
        "pp2": trainer_run(2, 9.002, 0.5, pp_size="2", activation_checkpointing="True"),
        "tp2": trainer_run(2, 9.0005, 0.4, tp_size="2"),
    }


def test_the_trainers_table_of_two_gpus(modules) -> None:
    table = modules.trainer_report.results_table(trainer_results(modules, two_gpus(modules)))
    assert "bfloat16, 2 x NVIDIA H100, attention kernel `flash-attn-2`" in table  # though one GPU ran first
    assert "the time of the median one. Not measured: `dp2`, `fsdp2`.\n" in table
    assert "| cp2 | 45.0% | 250 | 2.00 | 1.250 | 61 | no | yes |\n| pp2 | 50.0% | 250 |" in table
    assert "On 1 x NVIDIA H100 a step of `WLBTrainer` takes 2.0% longer than" in table
    assert "step is at most 0.002 off that of `cp2`, and that of another split, which adds up in another order" in table
    assert "order, at most 0.0005. torch 2.11; 2026-12-01, commit abc" in table


def test_splits_that_train_other_steps_are_not_compared(modules) -> None:
    """Replicas share a step's micro-batches out, so its documents are others."""
    runs = {**two_gpus(modules), "dp2": trainer_run(2, 8.0, 0.4)}
    runs["dp2"]["steps"] = [{**row, "tokens_per_step": 1001} for row in runs["dp2"]["steps"]]
    found = modules.trainer_report.loss_differences(runs)
    assert found == modules.trainer_report.loss_differences(two_gpus(modules))
    assert found["loss_difference_others"] == 0.0005
    table = modules.trainer_report.results_table(trainer_results(modules, runs))
    assert "`dp2` trained the same documents in other steps than `cp2`: replicas share" in table


def test_what_cannot_be_compared_is_not(modules) -> None:
    """Pipelines without another run of the same steps; of a run that failed, the steps that it has are."""
    runs = two_gpus(modules)
    runs["pp2"]["steps"] = runs["pp2"]["steps"][:2]
    assert modules.trainer_report.loss_differences(runs)["loss_difference_pipelines"] == 0.002
    table = modules.trainer_report.results_table(trainer_results(modules, runs))
    assert "trained the same documents in other steps" not in table
    for name in ("cp2", "tp2"):
        runs[name]["steps"] = [{**row, "tokens_per_step": 1001} for row in runs[name]["steps"]]
    assert modules.trainer_report.loss_differences(runs) == {}
    assert "the loss of a pipeline's" not in modules.trainer_report.results_table(trainer_results(modules, runs))
    runs = two_gpus(modules)
    runs["pp2"]["steps"][2] = {**runs["pp2"]["steps"][2], "loss": float("nan")}
    with pytest.raises(ValueError, match="A loss of pp2, cp2 is not finite"):
        modules.trainer_report.loss_differences(runs)


def test_gradient_norms_are_compared_too(modules) -> None:
    runs = two_gpus(modules)
    for name, norm in (("cp2", 2.0), ("pp2", 2.002), ("tp2", 1.999)):
        runs[name]["steps"] = [{**row, "grad_norm": norm} for row in runs[name]["steps"]]
    found = modules.trainer_report.loss_differences(runs)
    assert (found["grad_norm_difference_pipelines"], found["grad_norm_difference_others"]) == (0.001, 0.0005)
    table = modules.trainer_report.results_table(trainer_results(modules, runs))
    assert "Gradient norms are at most 0.10% and 0.05% apart." in table


def test_an_earlier_measurement_of_the_overhead_names_its_commit(modules) -> None:
    for commit, named in (("abc", "Llama. On"), ("def", "Llama, commit def. On")):
        runs = two_gpus(modules)
        runs["overhead"]["commit"] = commit
        assert named in modules.trainer_report.results_table(trainer_results(modules, runs))


def test_the_trainers_table_without_overhead_pipelines_or_a_run(modules) -> None:
    runs = {"fsdp2": {"options": {}, "processes": 2, "seconds": 3.0, "problem": "out of memory"}}
    runs["cp2"] = trainer_run(2, 9.0, 0.45, cp_size="2")
    results = trainer_results(modules, runs)
    assert results["result"]["overhead"] is None
    table = modules.trainer_report.results_table(results)
    assert "What `WLBTrainer` adds to a bare loop was not measured. `fsdp2` failed. torch 2.11;" in table
    assert "the loss of a pipeline's" not in table and "| fsdp2 |" not in table
    assert modules.trainer_report.loss_differences(runs) == {}
    only = {"pp2": trainer_run(2, 9.0, 0.5, pp_size="2"), "tp2": {**trainer_run(2, None, 0.4), "steps": []}}
    assert "the loss of a pipeline's" not in modules.trainer_report.results_table(trainer_results(modules, only))
    alone = trainer_results(modules, {"overhead": overhead_run()})
    shown = modules.trainer_report.results_table(alone)
    assert (
        shown.startswith("No split was measured.") and "On 1 x NVIDIA H100 a step" in shown and "| split" not in shown
    )
