"""The context-parallel benchmark's whole way through, tiny, on two CPU processes."""

import json
import statistics
import sys

import pytest
import torch

from hf_wlb.lengths import sample_lengths
from tests.support.scripts import run_script
from tests.support.source_tree import REPOSITORY
from tests.support.spawn import run_distributed

SCRIPT = "recipes/benchmarks/context_parallel.py"
FOLDER = REPOSITORY / "recipes" / "benchmarks"


def run_benchmark(folder, *more):
    """(What was printed, the results file)."""
    lengths = folder / "sampled.json"
    lengths.write_text(json.dumps(sample_lengths(20_000, seed=1).tolist()))
    output = folder / "results.json"
    words = ["--lengths", lengths, "--device", "cpu", "--shrink", "256", "--heads", "4", "--kv_heads", "2"]
    words += ["--head_size", "8", "--samples", "2", "--choices", "4", "--quick", "--output", output, *more]
    done = run_script(SCRIPT, *words, processes=2)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(output.read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_benchmark(tmp_path_factory.mktemp("context_parallel"))


def test_one_part_alone(tmp_path) -> None:
    printed, results = run_benchmark(tmp_path, "--parts", "contexts")
    assert set(results["kv_heads"]["2"]) == {"contexts"} and results["settings"]["parts"] == ["contexts"]
    assert not results["complete"] and results["result"]["error_ratio"] is None
    assert "2 KV heads: exchange in groups" in printed and "percent of the ideal" not in printed


def test_the_last_line_is_the_result(run) -> None:
    printed, results = run
    last = printed.rstrip().splitlines()[-1]
    assert json.loads(last.removeprefix("RESULT ")) == results["result"]
    keys = {"share_2kv_short", "share_2kv_long", "regret_max", "choice_agreement"}
    assert keys < set(results["result"])
    assert 0 < results["result"]["error_ratio"] <= 1.5
    assert results["result"]["token_skew"] <= 0.05 and results["complete"]
    assert results["result"]["memory_ratio"] is None  # measured on GPUs only


def test_figures_follow_from_the_samples(run) -> None:
    for part in run[1]["kv_heads"].values():
        for row in part["cases"]:
            ideal = statistics.median(s for rank in row["ideal_samples_ms"] for s in rank)
            assert row["ideal_ms"] == pytest.approx(ideal, abs=2e-4)
            strategies = row["strategies"]
            medians = {}
            for label, figures in strategies.items():
                samples = strategies[figures.get("same_as", label)]["samples_ms"]
                assert len(samples) == 2
                medians[label] = statistics.median(samples)
                assert figures["ms"] == pytest.approx(medians[label], abs=2e-4)
                assert figures["share"] == pytest.approx(ideal / medians[label], abs=2e-3)
            best = min(ms for label, ms in medians.items() if label != "adaptive")
            assert row["regret"] == pytest.approx(medians["adaptive"] / best - 1, abs=2e-3)


def test_every_part_left_its_results(run) -> None:
    results = run[1]
    assert results["settings"]["kernel"] == "reference" and results["settings"]["lengths"] == "sampled"
    for kv_heads, part in results["kv_heads"].items():
        assert set(part) == {"errors", "profile", "cases", "choice", "contexts"}
        assert part["profile"]["metadata"]["model"]["kv_heads"] == int(kv_heads)
        operations = {sample["operation"] for sample in part["profile"]["collectives"]}
        assert operations == {"all_gather", "reduce_scatter", "key_value_exchange"}
        assert any(plan["sharded"] for plan in part["errors"]["plans"].values())
        assert len(part["choice"]["micro_batches"]) == 4
        # Automatic, 1 or 2 groups, gathered again or kept.
        assert [len(times) for times in part["contexts"]["ms"].values()] == [6, 6]
    assert "/" not in results["environment"]["command"].replace(SCRIPT, "")


@pytest.mark.parametrize(
    ("environment", "device", "sentence"),
    [
        ({}, "cpu", "Several processes are needed: torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "cpu", "Context parallelism needs 2 processes at least"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "cuda", "torch sees no CUDA device"),
    ],
)
def test_errors_are_sentences(environment, device, sentence, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import context_parallel

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([300, 900, 2500, 7000, 12_000, 40_000]))
    assert context_parallel.main(["--lengths", str(file), "--device", device, "--quick"]) == 2
    assert f"Error: {sentence}" in capsys.readouterr().err


def error_ratio(rank: int, world_size: int, broken: bool) -> float:
    sys.path.insert(0, str(FOLDER))
    from context_parallel_measure import Place, errors

    from hf_wlb.attention.context import AttentionContext
    from hf_wlb.attention.kernels import ReferenceKernel
    from hf_wlb.parallel import ProcessGroupExchange
    from hf_wlb.profiling import AttentionShape
    from hf_wlb.sharding import per_document

    class Forgetful(ProcessGroupExchange):
        """Leaves the other ranks' gradients out."""

        def reduce_scatter(self, parts: torch.Tensor):
            own = parts.view(self.size, -1, *parts.shape[1:])[self.rank]
            return super().reduce_scatter(own.repeat(self.size, *[1] * (own.ndim - 1)) / self.size)

    place = Place(rank, world_size, torch.device("cpu"))
    shape = AttentionShape(4, 2, 8, dtype=torch.bfloat16)
    context = AttentionContext(exchange=Forgetful() if broken else ProcessGroupExchange())
    lengths = [1, 7, 137, 60]
    plans = {"per_document": per_document(lengths, world_size)}
    found = errors(place, shape, ReferenceKernel(), context, lengths, plans)
    return found["ratio"]


@pytest.mark.parametrize("broken", [False, True])
def test_control_gradients_left_out_are_a_large_error(broken) -> None:
    first, second = run_distributed(error_ratio, 2, broken)
    assert first == second and (first > 1.5) == broken
