"""The convergence benchmark's whole way through, tiny, on the CPU; and the source files that it trains on."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from hf_wlb.data.stdlib_documents import source_file_documents, standard_library_documents
from tests.support.source_tree import REPOSITORY

SCRIPT = "recipes/benchmarks/convergence.py"


def command(folder, *words):
    """A quick call; everything it leaves goes below ``folder``, where the documents are whatever runs there are."""
    words = words if "--only" in words else ("--only", "sequential", "steady", *words)
    runs = [] if "--folder" in words else ["--folder", str(folder / "runs")]
    places = ["--text", str(folder / "text"), "--documents", str(folder / "documents"), *runs]
    return [sys.executable, SCRIPT, "--quick", "--use-cpu", "--gpus", "2", *places, *words]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}


def call(folder, *words):
    """Waits for its end."""
    return subprocess.run(
        command(folder, *words),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(Folder, what was printed) of a first call."""
    folder = tmp_path_factory.mktemp("convergence")
    (folder / "text").mkdir()
    for number, text in enumerate(standard_library_documents()[:400]):
        (folder / "text" / f"{number}.py").write_text(text, encoding="utf-8")
    prepared = call(folder, "--prepare", "--steps", "60")  # enough for other tests, too
    assert prepared.returncode == 0, prepared.stderr
    assert "tokenised in" in prepared.stdout and "RESULT" not in prepared.stdout
    assert os.listdir(folder / "documents") and not (folder / "runs").exists()
    done = call(folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def results(trained):
    return json.loads((trained[0] / "runs" / "convergence.json").read_text())


def with_base(trained, folder):
    """A folder in which no run but the base was finished."""
    shutil.copytree(trained[0] / "runs" / "base", folder / "base")
    shutil.copy(trained[0] / "runs" / "base.json", folder)
    return folder


def test_the_last_line_is_the_result(trained, results) -> None:
    last = trained[1].rstrip().splitlines()[-1]
    assert json.loads(last.removeprefix("RESULT ")) == results["result"]
    found = results["result"]
    assert found["delay_mean"] > 0 and found["delayed_share"] > 0
    assert 0 <= found["convergence_diff"] < 0.1
    assert found["noise"] is None and found["convergence_diff_wlb"] is None and found["runs"] == 2
    assert (trained[0] / "runs" / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_both_runs_trained_all_documents_and_learnt(results) -> None:
    about = results["documents"]
    assert about["tokens"] == about["steps"] * 4 * 512
    for name, run in results["runs"].items():
        assert sum(run["tokens"]) == about["tokens"] and len(run["tokens"]) == len(run["loss"])
        assert len(run["loss"]) == pytest.approx(about["steps"], rel=0.2)
        assert run["evaluations"][-1][:2] == [len(run["loss"]), about["tokens"]]
        assert run["evaluations"][-1][2] < run["loss"][0]
        assert (run["packing"]["delay"] > 0) == (run["delayed_share"] > 0) == (name == "steady")
    plain, steady = (run["loss"] for run in results["runs"].values())
    assert plain[0] == pytest.approx(steady[0], rel=0.1) and plain != steady  # same weights, other micro-batches


def test_runs_start_from_the_weights_of_the_base(results) -> None:
    base, runs = results["base"], results["runs"].values()
    assert sum(base["tokens"]) == results["documents"]["base"][1] == 12 * 512
    assert base["evaluations"][-1][2] < base["evaluations"][0][2] < base["loss"][0]
    starts = [[run["evaluations"][0], run["copying"][0]] for run in runs]
    assert starts[0] == starts[1] and starts[0][0][:2] == [0, 0]
    assert starts[0][0][2] == pytest.approx(base["evaluations"][-1][2], rel=0.05)  # other documents, longer ones
    assert starts[0][1][2:] == pytest.approx(base["copying"][-1][2:], rel=1e-4)  # the same strings
    for run in runs:
        assert run["copying"][-1][:2] == run["evaluations"][-1][:2]
        assert run["copying"][-1][2:] != run["copying"][0][2:]


def test_a_second_call_repeats_no_finished_run(trained, results) -> None:
    folder = trained[0] / "runs"
    before = (folder / "steady.json").read_text()
    (folder / "sequential.json").unlink()
    done = call(trained[0])
    assert done.returncode == 0, done.stderr
    assert "base: was finished before" in done.stdout and "steady: was finished before" in done.stdout
    assert re.search(r"^sequential: finished after", done.stdout, re.MULTILINE)
    assert (folder / "steady.json").read_text() == before
    again = json.loads((folder / "convergence.json").read_text())["runs"]["sequential"]
    assert again["loss"] == results["runs"]["sequential"]["loss"]


def test_a_run_that_was_ended_goes_on_from_its_checkpoint(trained, tmp_path) -> None:
    words = ("--only", "steady", "--steps", "60")
    whole, cut = with_base(trained, tmp_path / "whole"), with_base(trained, tmp_path / "cut")
    done = call(trained[0], *words, "--folder", str(whole))
    assert done.returncode == 0, done.stderr
    assert "base: was finished before" in done.stdout
    words = (*words, "--folder", str(cut), "--checkpoints", "5")
    process = subprocess.Popen(command(trained[0], *words), cwd=REPOSITORY, env=environment())
    end = time.monotonic() + 200
    while not list(cut.glob("steady/checkpoint-*/trainer_state.json")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143 and not (cut / "steady.json").exists()
    done = call(trained[0], *words)
    assert done.returncode == 0, done.stderr
    assert "goes on from checkpoint-" in (cut / "steady.log").read_text()
    assert not list(cut.glob("steady/checkpoint-*"))
    first, second = (json.loads((folder / "steady.json").read_text()) for folder in (whole, cut))
    for run in (first, second):
        for name in ("seconds", "seconds_before"):
            del run[name]
        for name in ("plan_ms", "plan_ms_p99"):
            del run["packing"][name]
    assert first == second


def test_a_checkpoint_of_other_settings_is_not_gone_on_from(trained, tmp_path) -> None:
    checkpoint = tmp_path / "steady" / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    state = {"stateful_callbacks": {"Recorder": {"args": {"identity": "another"}}}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    with_base(trained, tmp_path)
    done = call(trained[0], "--only", "steady", "--folder", str(tmp_path))
    assert done.returncode == 1 and "is of a run with other settings, documents or base" in done.stderr


def test_other_settings_and_broken_files_are_refused_in_plain_words(trained) -> None:
    done = call(trained[0], "--steps", "19")
    assert done.returncode == 2
    assert "was written with other settings: steps 20 there, 19 now" in done.stderr
    file = trained[0] / "runs" / "steady.json"
    whole = file.read_text()
    file.write_text(whole[:100])
    done = call(trained[0])
    file.write_text(whole)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"Error: {file} cannot be read" in done.stderr and "Remove it to begin anew" in done.stderr


# ---- its documents ----


def test_source_files_are_documents_once_each_in_an_order_of_their_content(tmp_path) -> None:
    for name, text in {
        "a/one.py": "x = 1\n",
        "b/same.py": "x = 1\n",
        "b/two.md": "# two\n",
        "b/long.py": "y" * 50,
        "b/empty.py": " \n",
        "b/data.bin": "z",
        "site-packages/three.py": "x = 3\n",
        "__pycache__/four.py": "x = 4\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "b" / "latin.py").write_bytes(b"# \xe9\n")
    found = source_file_documents([tmp_path], most_bytes=40)
    assert sorted(found) == ["# two\n", "x = 1\n"]
    assert source_file_documents([tmp_path / "b", tmp_path / "a"], most_bytes=40) == found
    assert "x = 3\n" in source_file_documents([tmp_path, tmp_path / "site-packages"])
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        source_file_documents([tmp_path / "missing"])
