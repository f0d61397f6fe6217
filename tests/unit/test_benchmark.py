"""The packing benchmark: what it prints and dumps agrees with a recount from the dumped plans."""

import json
import math
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.source_tree import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "benchmarks"
RESULTS = FOLDER / "results" / "packing.json"
KEYS = {
    "imbalance_next_fit",
    "imbalance_concat_cut",
    "imbalance_wlb",
    "delay_wlb",
    "imbalance_steady",
    "delay_steady",
    "delay_worst_steady",
    "token_variation_steady",
    "time_gap_64",
    "waiting_mean_64",
    "waiting_peak_64",
    "plan_ms",
    "plan_ms_64",
    "lengths",
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run on the sampler: (RESULT, lines of the dump)."""
    dump = tmp_path_factory.mktemp("benchmark") / "plans.jsonl"
    command = [sys.executable, "packing.py", "--quick", "--sampler", "--steps", "24", "--dump", str(dump)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("RESULT ")
    return json.loads(last.removeprefix("RESULT ")), [json.loads(line) for line in dump.read_text().splitlines()]


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import packing_report

    return packing_report


def steps_of(lines, packer):
    """Step -> (flush, [replica][micro-batch] -> [(length, arrived)])."""
    steps: dict[int, tuple[bool, dict[int, dict[int, list[tuple[int, int]]]]]] = {}
    for line in lines:
        if line["packer"] == packer:
            flush, replicas = steps.setdefault(line["step"], (line["flush"], defaultdict(dict)))
            assert flush == line["flush"]
            documents = zip(line["documents"], line["arrived"], strict=True)
            replicas[line["replica"]][line["micro_batch"]] = [(length, at) for (_, _, length), at in documents]
    return steps


def recount(lines, packer, pp_size=4):
    """Imbalance, delay, variation and time gap, written without anything of the package."""
    steps = steps_of(lines, packer)
    regular = [replicas for flush, replicas in steps.values() if not flush]
    after = len(regular)
    imbalances, tokens, time, bound = [], [], 0.0, 0.0
    for replicas in regular:
        work = [
            [sum(d + d * (d + 1) / 24577 for d, _ in documents) for _, documents in sorted(micro_batches.items())]
            for _, micro_batches in sorted(replicas.items())
        ]
        flat = [w for replica in work for w in replica]
        imbalances.append(max(flat) * len(flat) / sum(flat))
        time += max(sum(replica) + (pp_size - 1) * max(replica) for replica in work)
        bound += sum(flat) / len(flat) * (len(work[0]) + pp_size - 1)
        tokens.append(sum(d for r in replicas.values() for m in r.values() for d, _ in m))
    waited = trained = 0
    for step, (flush, replicas) in steps.items():
        for length, arrived in (d for r in replicas.values() for m in r.values() for d in m):
            if not flush or arrived < after:  # what waited when the data ended counts at its age then
                waited += length * ((after if flush else step) - arrived)
                trained += length
    mean = sum(tokens) / len(tokens)
    variation = math.sqrt(sum((t - mean) ** 2 for t in tokens) / len(tokens)) / mean
    return {
        "imbalance": sum(imbalances) / len(imbalances),
        "delay": waited / trained,
        "variation": variation,
        "time_gap": time / bound,
    }


def test_result_has_every_key_and_only_numbers_but_the_source(quick) -> None:
    result, _ = quick
    assert set(result) >= KEYS and result["lengths"] == "sampler"
    assert all(isinstance(value, (int, float)) for key, value in result.items() if key != "lengths")
    assert result["imbalance_steady"] < result["imbalance_wlb"] < result["imbalance_next_fit"]


@pytest.mark.parametrize(
    ("packer", "keys"),
    [
        ("next-fit", {"imbalance": "imbalance_next_fit"}),
        ("concat-and-cut", {"imbalance": "imbalance_concat_cut"}),
        ("wlb, 2 queues", {"imbalance": "imbalance_wlb", "delay": "delay_wlb", "variation": "token_variation_wlb"}),
        (
            "steady",
            {
                "imbalance": "imbalance_steady",
                "delay": "delay_steady",
                "variation": "token_variation_steady",
                "time_gap": "time_gap_steady",
            },
        ),
        ("64: steady", {"time_gap": "time_gap_64", "delay": "delay_64"}),
    ],
)
def test_the_dumped_plans_give_the_same_figures(quick, packer, keys) -> None:
    result, lines = quick
    figures = recount(lines, packer)
    for name, key in keys.items():
        assert figures[name] == pytest.approx(result[key], abs=1e-4), key


def test_every_packer_trains_the_same_documents_completely(quick) -> None:
    _, lines = quick
    pieces = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for index, start, length in line["documents"]:
            pieces[line["packer"]][index].append((start, length))
    assert "solver, 1 global batch" in pieces
    for size in ("", "64: "):
        reference = {index: sum(n for _, n in found) for index, found in pieces[f"{size}next-fit"].items()}
        assert len(reference) > 1000
        for packer, documents in pieces.items():
            if packer.startswith("64: ") != bool(size) or "solver" in packer:
                continue
            assert {index: sum(n for _, n in found) for index, found in documents.items()} == reference, packer
            for found in documents.values():
                found.sort()
                assert all(a + n == b for (a, n), (b, _) in pairwise(found)) and found[0][0] == 0


def test_the_committed_results_are_small_and_name_no_machine() -> None:
    assert RESULTS.stat().st_size < 500_000
    text = RESULTS.read_text()
    assert "/home/" not in text and "/work" not in text and "hostname" not in text
    results = json.loads(text)
    assert set(results["result"]) >= KEYS
    assert set(results["environment"]) == {
        *("date", "commit", "command", "seed", "cpu", "python", "numpy", "scipy", "hf_wlb")
    }
    for picture in RESULTS.parent.glob("*.png"):
        assert picture.stat().st_size < 150_000, picture.name


def test_control_a_changed_result_is_noticed(report) -> None:
    results = json.loads(RESULTS.read_text())
    before = [made(results) for made in (report.results_tables, report.readme_table)]
    results["sources"][results["result"]["lengths"]]["table"][1]["imbalance"] += 0.01
    after = [made(results) for made in (report.results_tables, report.readme_table)]
    assert all(new != old for new, old in zip(after, before, strict=True))


def test_a_page_without_marks_is_one_sentence(report) -> None:
    with pytest.raises(ValueError, match=r"docs/results.md has no place for the table"):
        report.with_table("# Title\n", "table")
    with pytest.raises(ValueError, match=r"README.md has no place for the table"):
        report.with_summary("# Title\n", "table")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["--lengths", "nowhere.json"], "There is no file 'nowhere.json'"), (["--steps", "1"], "--steps must be")],
)
def test_errors_are_sentences(given, sentence) -> None:
    command = [sys.executable, "packing.py", "--quick", *given]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_own_lengths_are_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{n}\n" for n in [4000, 9000, 60_000, 700] * 20))
    command = [sys.executable, "packing.py", "--quick", "--steps", "4", "--lengths", str(path)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.rstrip().splitlines()[-1].removeprefix("RESULT "))["lengths"] == "mine"
