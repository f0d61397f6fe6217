"""``hf-wlb simulate``: its table, files and refusals; the paper's evaluation in a few steps, its pictures and pages."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from hf_wlb.analysis import simulation
from hf_wlb.analysis.environment import commit, environment, shown_command
from hf_wlb.analysis.inputs import longer_documents, read_lengths
from hf_wlb.analysis.simulation_tables import changes, paper_tables
from hf_wlb.cli import app
from hf_wlb.cli.text import TextOptions
from hf_wlb.lengths import sample_lengths
from hf_wlb.packing import ArraySource, PackingConfig, StepPlanner
from hf_wlb.plots import assumptions as assumption_plots
from hf_wlb.plots import paper as plots
from hf_wlb.simulator.comparison import BASELINE
from hf_wlb.simulator.paper import CONFIGURATIONS
from hf_wlb.simulator.systems import SYSTEMS
from hf_wlb.workload import AnalyticWorkload
from tests.support.source_tree import REPOSITORY

SMALL = ["--model", "550M", "--context", 16384, "--tp", 2, "--cp", 2, "--pp", 2, "--dp", 2, "--steps", 6]
RESULT_KEYS = {
    "fig12_mean_paper_method",
    "fig12_mean_placed",
    "table2_wlb_imbalance",
    "seconds_8192",
    "prediction_error",
    "fig12_mean_paper_method_over_cut",
    "fig12_mean_paper_method_flash_attn_4",
    "least_placed_over_paper_method",
}
PICTURES = {"fig12", "fig13", "fig14", "fig15", "sensitivity", "explanation"}


def run(*arguments: object, columns: int = 80):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": str(columns)})


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps((sample_lengths(4000, seed=2) // 8 + 1).tolist()))
    return path


def rows_of(text: str) -> dict[str, list[str]]:
    """System -> cells of the table."""
    found = {}
    for line in text.splitlines():
        for name in SYSTEMS:
            match = re.match(rf" {re.escape(name)}  +(\d.*)", line)
            if match:
                found[name] = match.group(1).split()
    return found


# ---- one configuration ----


def test_every_system_has_a_row(lengths_file) -> None:
    result = run(*SMALL, "--data", lengths_file)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = rows_of(result.stdout)
    assert list(rows) == list(SYSTEMS)
    assert {len(cells) for cells in rows.values()} == {8}
    assert rows[BASELINE][2] == "1.00x" and rows[BASELINE][5] == "0.00"
    text = " ".join(result.stdout.split())
    assert "Lengths: lengths in lengths.json" in text
    assert "550M, context 16,384, TP2 CP2 PP2 DP2 on 16 GPUs (h100), 2 micro-batches a replica, 1f1b, without" in text
    assert "Attention = linear work at" in text and "delay: mean steps that a token waited" in text


def test_files_are_written(lengths_file, tmp_path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "png", "trace")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    result = run(*SMALL, "--data", lengths_file, "--system", "placed", "--system", "balanced", *options)
    assert result.exit_code == 0, result.output
    assert list(rows_of(result.stdout)) == [BASELINE, "placed", "balanced"]
    found = json.loads(files["json"].read_text())
    assert found["schema"] == "hf_wlb.simulation/1" and found["split"]["pp_size"] == 2
    for figures in found["systems"].values():
        assert sum(figures["each_step_seconds"]) == pytest.approx(figures["seconds"])
    assert files["png"].read_bytes().startswith(b"\x89PNG") and files["png"].stat().st_size < 150_000
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert any("placed" in json.dumps(event) for event in events)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--schedule", "interleaved"], "interleaved, 2 model chunks"),
        (["--schedule", "seq1f1b", "--pieces", 3], "seq1f1b, 3 pieces"),
        (["--gradient-checkpointing"], "1f1b, with gradient checkpointing"),
        (["--cluster", "h100-flash-attn-4", "--gpus-per-node", 4], "(h100-flash-attn-4)"),
        (["--micro-batches", 6, "--s-max", 16384], "6 micro-batches a replica"),
        (["--fsdp"], "TP2 CP2 PP2 FSDP2"),
    ],
)
def test_options_are_said_and_change_the_step(lengths_file, options, said) -> None:
    given = [*SMALL, "--data", lengths_file, "--system", "placed"]
    usual, other = run(*given), run(*given, *options)
    assert other.exit_code == 0, other.output
    assert said in " ".join(other.stdout.split())
    assert rows_of(other.stdout)["placed"] != rows_of(usual.stdout)["placed"]


def test_what_does_not_fit_is_noted(lengths_file) -> None:
    given = ["--model", "30B", "--context", 16384, "--steps", 2, "--data", lengths_file, "--system", "placed"]
    text = " ".join(run(*given).stdout.split())
    assert re.search(r"Note: placed needs \d+ GB of a GPU's 80 GB, so it cannot run\.", text)
    assert "Note:" not in run(*SMALL, "--data", lengths_file, "--system", "placed").stdout


def test_documents_above_the_context_are_said(tmp_path) -> None:
    data, written = tmp_path / "lengths.json", tmp_path / "out.json"
    data.write_text(json.dumps([*[500] * 3000, 16384, 16385, 40_000]))
    given = [*SMALL, "--data", data, "--json", written, "--system", "wlb", "--steps", 40]
    text = " ".join(run(*given).stdout.split())
    found = json.loads(written.read_text())["longer_documents"]
    assert found["limit"] == 16384 and found["longer"] >= 2 and 2 * found["longer"] < found["pieces"]
    assert (
        f"{found['longer']:,} of {found['documents']:,} documents are longer than the context and are split at every "
        f"16,384 tokens into {found['pieces']:,} pieces in all"
    ) in text
    # Negative control: none is longer, and nothing is split.
    data.write_text(json.dumps([500] * 3000 + [16384]))
    text = " ".join(run(*given).stdout.split())
    found = json.loads(written.read_text())["longer_documents"]
    assert (found["longer"], found["pieces"]) == (0, 0) and "split at every" not in text
    assert f"none of {found['documents']:,} documents is longer than the context of 16,384 tokens" in text


def test_repeated_documents_are_said(tmp_path) -> None:
    data, written = tmp_path / "lengths.json", tmp_path / "out.json"
    given = [*SMALL, "--data", data, "--json", written, "--system", "wlb"]
    data.write_text(json.dumps([4000, 0, 5000, 6000]))
    text = " ".join(run(*given).stdout.split())
    found = json.loads(written.read_text())["longer_documents"]
    assert found["repeated"] is True and found["given"] == 3 and found["documents"] > 3
    assert f"Documents: {found['documents']:,} used of 3 given, repeated as often as needed; none of" in text
    # Negative control: there are enough, and some are left.
    data.write_text(json.dumps([4000] * 3000))
    text = " ".join(run(*given).stdout.split())
    found = json.loads(written.read_text())["longer_documents"]
    assert found["repeated"] is False and found["given"] == 3000 > found["documents"]
    assert f"Documents: {found['documents']:,} used of 3,000 given; none of" in text and "repeated" not in text


def test_longer_documents_are_those_that_the_reader_splits() -> None:
    lengths = sample_lengths(3000, seed=4)
    config = PackingConfig(8192, 4, max_document_tokens=8192)
    planner = StepPlanner(ArraySource(lengths), AnalyticWorkload(1.0, 1.0), config)
    assert list(planner)
    found, counts = longer_documents(lengths, 8192), planner.counts
    assert (found.documents, found.longer, found.pieces) == (counts.documents, counts.split, counts.pieces)
    assert found.longer > 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give --model, a preset or the folder of a configuration; or --paper"),
        (["--model", "550M", "--quick"], "--quick can be given with --paper only"),
        (
            ["--model", "550M", "--flat-data", "x", "--output", "y"],
            "--flat-data, --output can be given with --paper only",
        ),
        (
            ["--paper", "--tp", "2", "--steps", "5"],
            "--steps, --tp cannot be given with --paper, to which they do not apply; it takes only --data, "
            "--flat-data, --measured, --output, --quick, --seed.",
        ),
        (["--paper", "--tokenizer", "x"], "--tokenizer cannot be given with --paper, to which it does not apply;"),
        (
            ["--model", "550M", "--system", "mine"],
            "There is no system mine: --system is one of plain-4d; plain-4d, cut",
        ),
        (["--model", "550M", "--schedule", "gpipe"], "There is no schedule 'gpipe'"),
        (["--model", "550M", "--pieces", "3"], "--pieces is for --schedule seq1f1b, but the schedule is 1f1b"),
        (["--model", "550M", "--schedule", "seq1f1b", "--model-chunks", "2"], "--model-chunks is for --schedule inter"),
        (["--model", "550M", "--cluster", "tpu"], "--cluster must be one of h100"),
        (["--model", "550M", "--tp", "3"], "tp_size=3 does not divide the model's attention heads"),
        (["--model", "550M", "--data", "nowhere.json"], "nowhere.json"),
        (["--model", "550M", "--png", "no/such/a.png"], "there is no folder"),
        (["--model", "550M", "--png", "."], ". cannot be written: it is a folder"),
        (["--model", "550M", "--trace", "no/such/a.json"], "there is no folder"),
        (
            ["--model", "550M", "--tokenizer", "x", "--text-split", "y"],
            "--tokenizer, --text-split say how to read text",
        ),
        (["--model", "550M", "--tokenizer", "x"], "--tokenizer says how to read text, but no --data is given"),
        (["--model", "550M", "--profile", "nowhere.json"], "nowhere.json"),
        (["--paper", "--data", "nowhere.json"], "nowhere.json"),
        (["--paper", "--quick", "--measured", "nowhere.json"], "nowhere.json"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_files_that_cannot_be_are_noticed_before_the_work(monkeypatch, tmp_path) -> None:
    begun: list[object] = []
    monkeypatch.setattr(TextOptions, "read", lambda *given: begun.append(given) or read_lengths(None))
    for options in (["--png", tmp_path], ["--json", tmp_path], ["--trace", tmp_path / "none" / "a.json"]):
        result = run(*SMALL, *options)
        assert result.exit_code == 2 and "cannot be written" in result.stderr, result.output
    assert not begun
    assert run(*SMALL, "--system", "wlb", "--png", tmp_path / "a.png").exit_code == 0 and begun  # negative control


# ---- the paper's evaluation ----


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """A quick run: what was printed, and its folder."""
    folder = tmp_path_factory.mktemp("paper") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hf-wlb", "simulate", "--paper", "--quick", "--output", str(folder)])
        result = run("--paper", "--quick", "--output", folder, columns=150)
    assert result.exit_code == 0, result.output
    return result.stdout, folder


def test_the_last_line_is_the_result(paper) -> None:
    stdout, folder = paper
    last = stdout.rstrip().splitlines()[-1]
    assert last.startswith("RESULT ")
    found = json.loads(last.removeprefix("RESULT "))
    assert set(found) >= RESULT_KEYS
    assert found == json.loads((folder / simulation.FILE).read_text())["result"]
    assert found["fig12_mean_placed"] > 1 and 1 <= found["table2_wlb_imbalance"] < 1.3
    assert found["paper_fig12_mean"] == 1.23 and "built-in sampler" in found["data"]
    if not simulation.committed_results():
        assert found["prediction_error"] is None


def test_everything_is_shown_beside_the_papers_numbers(paper) -> None:
    text = " ".join(paper[0].split())
    for title in ("Table 2", "Figure 12: speed-up", "Figure 12: means", "Figure 13", "Figure 14", "Figure 15"):
        assert title in text
    for title in ("8,192 GPUs", "What explains the difference", "Sensitivity", "No constant was fitted to the paper"):
        assert title in text
    for number in ("1.44", "467", "1.23", "1.33", "1.07"):
        assert number in text


def test_the_file_holds_all_and_names_no_machine(paper) -> None:
    file = paper[1] / simulation.FILE
    text = file.read_text()
    assert not re.search(r"/home/|/work|/root|/tmp", text)
    found = json.loads(text)
    assert found["schema"] == simulation.SCHEMA
    assert found["environment"]["command"] == "hf-wlb simulate --paper --quick --output results"
    assert found["extent"]["configurations"] == ["550M-128K", "7B-128K"]
    assert [row["configuration"] for row in found["fig12"]["rows"]] == ["550M-128K", "7B-128K"]
    assert set(found["clusters"]) == {"h100", "h100-flash-attn-4"} and set(found["assumed"]) >= {"matmul", "network"}
    assert found["data"]["squared_over_mean"] == pytest.approx(18_905, rel=0.02)


def test_the_whole_run_is_of_the_papers_configurations() -> None:
    assert simulation.FULL.configurations == CONFIGURATIONS
    assert simulation.FULL.contexts == (32768, 65536, 98304, 131072, 163840)
    json.dumps(simulation.FULL.to_dict())


def test_pictures_are_drawn(paper) -> None:
    for name in PICTURES:
        path = paper[1] / f"simulated_{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 150_000
        pixels = imread(path)[..., :3]
        assert 0.01 < (pixels.min(axis=2) < 0.95).mean() < 0.6


def test_pages_are_made_of_the_file(paper, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "recipes" / "benchmarks"))
    import simulated_paper as recipe

    readme, page = tmp_path / "README.md", tmp_path / "results.md"
    readme.write_text(f"# Title\n{recipe.SUMMARY_BEGIN}\nwhat was here before\n{recipe.SUMMARY_END}\nrest\n")
    page.write_text(f"# Results\n{recipe.BEGIN}\nwhat was here before\n{recipe.END}\nrest\n")
    monkeypatch.setattr(recipe, "README", readme)
    monkeypatch.setattr(recipe, "RESULTS_PAGE", page)
    file = tmp_path / simulation.FILE
    file.write_bytes((paper[1] / simulation.FILE).read_bytes())
    recipe.write_readme(file)
    found = json.loads(file.read_text())
    mean = found["fig12"]["means"]["placed"]["over_plain"]["all"]
    assert f"| {mean:.2f}x |" in readme.read_text() and "(1.23x)" in readme.read_text()
    assert "what was here before" not in readme.read_text() + page.read_text() and readme.read_text().endswith(
        "\nrest\n"
    )
    assert f"{found['fig13'][0]['speedup']:.3f}x" in page.read_text()
    assert page.read_text().count("### ") == 8 and page.read_text().count("![") == len(PICTURES)
    assert {path.stem for path in tmp_path.glob("*.png")} == {f"simulated_{name}" for name in PICTURES}


def test_the_recipe_simulates_into_the_results_folder(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "recipes" / "benchmarks"))
    import simulated_paper as recipe

    calls: list[list[str]] = []
    monkeypatch.setattr(recipe, "app", lambda words, standalone_mode: calls.append(words))
    monkeypatch.setattr(recipe, "write_readme", lambda: calls.append(["renewed"]))
    monkeypatch.setattr("sys.argv", ["simulated_paper.py"])
    assert recipe.main([]) == 0 and calls[1] == ["renewed"]
    assert calls[0][:4] == ["simulate", "--paper", "--output", str(recipe.RESULTS.parent)]
    assert recipe.main(["--write-readme"]) == 0 and calls[2:] == [["renewed"]]
    monkeypatch.setattr(recipe, "app", lambda words, standalone_mode: 2)
    assert recipe.main([]) == 2 and len(calls) == 3
    monkeypatch.setattr(recipe, "write_readme", lambda: recipe.with_summary("# Title\n", "table"))
    assert recipe.main(["--write-readme"]) == 2
    assert "README.md has no place for the table" in capsys.readouterr().err


def test_control_a_changed_figure_changes_tables_and_pages(paper, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "recipes" / "benchmarks"))
    import simulated_paper as recipe

    found = json.loads((paper[1] / simulation.FILE).read_text())
    other = copy.deepcopy(found)
    other["fig12"]["rows"][1]["systems"]["placed"]["speedup"] += 0.01
    for made in (recipe.readme_summary, recipe.results_tables, lambda own: shown(own)):
        assert made(found) == made(copy.deepcopy(found)) != made(other)


def shown(found) -> list[object]:
    """Cells of every table."""
    tables = [part for part in paper_tables(found) if hasattr(part, "columns")]
    return [list(column.cells) for table in tables for column in table.columns]


def test_pictures_refuse_nothing_to_draw(tmp_path) -> None:
    path = tmp_path / "a.png"
    for draw in (
        lambda: plots.plot_figure_12([], {}, path),
        lambda: plots.plot_figure_13([], path),
        lambda: plots.plot_figure_14([], path),
        lambda: plots.plot_figure_15([], [], path),
        lambda: assumption_plots.plot_sensitivity([], path),
        lambda: assumption_plots.plot_explanation([], 1.23, path),
    ):
        with pytest.raises(ValueError, match="to draw: give"):
            draw()
    assert not path.exists()


def test_changes_are_against_the_same_steps() -> None:
    base = {"low": {"paper": 1.3, "placed": 1.4}}
    row = {"low": {"paper": 1.2, "placed": 1.4}, "high": {"paper": 1.35, "placed": 1.5}}
    assert changes(row, base) == ["-0.100 / +0.050", "+0.000 / +0.100"]


# ---- environment ----


def test_what_was_run_is_told_without_folders() -> None:
    words = ["--data", "/some/where/lengths.json", "--output", "results/", "--steps", "5"]
    assert shown_command("hf-wlb", words) == "hf-wlb --data lengths.json --output results --steps 5"
    about = environment("hf-wlb simulate --paper", seed=3)
    assert set(about) == {"date", "commit", "command", "seed", "cpu", "python", "numpy", "scipy", "hf_wlb"}
    assert re.fullmatch(r"unknown|[0-9a-f]{12}(, with changes)?", commit())
