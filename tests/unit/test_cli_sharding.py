"""``hf-wlb shard``: what it prints, writes and draws, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from hf_wlb.analysis.sharding import analyze_shards, fill_context, rank_shares, read_micro_batch
from hf_wlb.analysis.sharding_tables import strategy_headings
from hf_wlb.cli import app
from hf_wlb.lengths import sample_lengths
from hf_wlb.sharding import SHARDED, Sharder, ShardingConfig, per_document
from hf_wlb.sharding.cost import HIDDEN
from hf_wlb.workload import AnalyticWorkload

WORKLOAD = AnalyticWorkload.from_crossover(8192)
MIX = [9000, 1200, 800, 2500, 300, 4000, 150, 700, 1900, 2600]
MIX_TEXT = ",".join(map(str, MIX))
STRATEGIES = ["per_sequence", "per_document", "placed", "adaptive"]


def run(*arguments: object, columns: int = 120):
    return CliRunner().invoke(app, ["shard", *map(str, arguments)], env={"COLUMNS": str(columns)})


def rows_of(output: str, title: str) -> list[list[str]]:
    """Cells of the table under a title, the headings left out."""
    lines = output[output.index(title) :].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith("──"))
    end = next(i for i in range(begin + 1, len(lines)) if not lines[i].strip())
    return [line.split() for line in lines[begin + 1 : end]]


def expected(lengths: list[int], cp_size: int, strategy: str, **options):
    return Sharder(ShardingConfig(cp_size, strategy, **options), WORKLOAD).plan(lengths)


@pytest.mark.parametrize("columns", [80, 120])
def test_every_strategy_has_a_row(columns) -> None:
    result = run("--lengths", MIX_TEXT, "--cp", 4, "--crossover", 8192, columns=columns)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "Micro-batch: 10 documents of 23,150 tokens, as given" in result.stdout
    rows = rows_of(result.stdout, "Every strategy")
    assert [row[0].rstrip(":") for row in rows] == STRATEGIES and rows[3][1] == "placed"
    ideal = sum(WORKLOAD.document(d) + 150 * 2 / 8193 * d for d in MIX) / 4
    for strategy, row in zip(STRATEGIES, rows, strict=True):
        plan = expected(MIX, 4, strategy)
        share, slowest, imbalance, skew, exchanged = row[-5:]
        assert float(share[:-1]) == pytest.approx(100 * ideal / plan.predicted.max(), abs=0.06)
        assert float(slowest.replace(",", "")) == pytest.approx(plan.predicted.max(), abs=0.6)
        assert imbalance == f"{plan.imbalance:.3f}" and skew == f"{plan.token_skew:.1%}"
        assert exchanged == f"{4 * plan.exchanged_tokens.max():,}"
    tokens = rows_of(result.stdout, "Tokens of every rank")
    for rank, row in enumerate(tokens):
        assert row == [str(rank), *(f"{expected(MIX, 4, strategy).tokens[rank]:,}" for strategy in STRATEGIES)]


def test_the_chosen_plan_is_told_rank_by_rank() -> None:
    result = run("--lengths", MIX_TEXT, "--cp", 4, "--crossover", 8192)
    plan = expected(MIX, 4, "adaptive")
    rows = rows_of(result.stdout, "adaptive's plan, placed; work in relative units")
    for rank, row in enumerate(rows):
        assert row[:2] == [str(rank), f"{(plan.owner == rank).sum()}:"]
        whole, head, tail, local, _, chunks, linear, waiting, work = (
            float(cell.replace(",", "")) if cell != "+" else 0.0 for cell in row[2:]
        )
        assert whole == plan.local_tokens[rank] and whole + head + tail == plan.tokens[rank]
        assert linear == pytest.approx(plan.tokens[rank], abs=0.06)
        assert local + chunks + linear + waiting == pytest.approx(work, abs=0.7)
        assert work == pytest.approx(plan.predicted[rank], abs=0.6)  # 10,000 and more are told in whole numbers
    speedup = expected(MIX, 4, "per_sequence").predicted.max() / plan.predicted.max()
    flat = " ".join(result.stdout.split())
    assert f"adaptive chose placed: {len(plan.edges)} of 10 documents cut" in flat
    assert f"{speedup:.2f}x over per_sequence" in flat


def test_json_holds_everything(tmp_path: Path) -> None:
    written = tmp_path / "shards.json"
    given = ("--lengths", MIX_TEXT, "--cp", 2, "--crossover", 8192, "--max-token-skew", 0.2, "--json", written)
    result = run(*given, "--max-tokens-per-shard", 12_000)
    assert result.exit_code == 0, result.output
    content = json.loads(written.read_text())
    assert content["schema"] == "hf_wlb.shards/1" and content["lengths"] == MIX and content["cp_size"] == 2
    assert content["unit"] == "relative" and content["workload"] == "attention = linear work at 8,192 tokens"
    assert [entry["strategy"] for entry in content["strategies"]] == STRATEGIES
    for entry in content["strategies"]:
        plan = expected(MIX, 2, entry["strategy"], max_token_skew=0.2, max_tokens_per_shard=12_000)
        assert entry["owner"] == plan.owner.tolist() and entry["edges"] == plan.edges.tolist()
        assert entry["chosen"] == plan.strategy and entry["threshold"] == plan.threshold
        assert [rank["tokens"] for rank in entry["ranks"]] == plan.tokens.tolist()
        assert max(plan.tokens) <= 12_000
        assert [rank["workload"] for rank in entry["ranks"]] == pytest.approx(plan.predicted.tolist())
        assert entry["share_of_ideal"] == pytest.approx(content["ideal"] / entry["slowest"])


def test_a_file_fills_the_context(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(sample_lengths(2000).tolist()))
    outputs = [run("--lengths", path, "--context", 20_000, "--seed", s, "--crossover", 8192).stdout for s in (1, 1, 2)]
    assert "of 20,000 tokens, drawn from the lengths in lengths.json, seed 1" in " ".join(outputs[0].split())
    assert outputs[0] == outputs[1] != outputs[2]


def test_without_lengths_the_sampler_is_named() -> None:
    result = run("--context", 30_000, "--crossover", 8192, "--cp", 2)
    flat = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "of 30,000 tokens, drawn from the built-in sampler" in flat


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "shards.png"
    result = run("--lengths", MIX_TEXT, "--cp", 4, "--crossover", 8192, "--png", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 200_000
    pixels = imread(picture)[..., :3]
    assert 0.05 < (pixels.min(axis=2) < 0.95).mean() < 0.7
    colours = {tuple(np.round(pixel * 255).astype(int)) for pixel in pixels[::3, ::3].reshape(-1, 3)}
    for rank_colour in ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167)):
        assert rank_colour in colours


def test_one_rank_needs_no_sharding(tmp_path: Path) -> None:
    result = run("--lengths", "5,6,7", "--cp", 1, "--crossover", 8192, "--png", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert "one rank holds everything" in result.stdout and "1 context-parallel rank;" in result.stdout
    assert [row[-5] for row in rows_of(result.stdout, "Every strategy")] == ["100.0%"] * 4


def test_times_are_told_in_milliseconds(tmp_path: Path) -> None:
    workload = AnalyticWorkload(1e-9, 1e-5, exchange_seconds_per_token=1e-6)
    workload.save(tmp_path / "w.json")
    result = run("--lengths", MIX_TEXT, "--cp", 2, "--profile", tmp_path / "w.json")
    assert result.exit_code == 0, result.output
    slowest = Sharder(ShardingConfig(2), workload).plan(MIX).predicted.max()
    assert "slowest (ms)" in result.stdout
    assert rows_of(result.stdout, "Every strategy")[3][-4] == f"{slowest * 1e3:.1f}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lengths", "90,x"], "'90,x' is neither"),
        (["--lengths", "nowhere.json"], "'nowhere.json' is neither: there is no such file."),
        (["--lengths", "90,-5"], "separated by commas; '-5' is not"),
        (["--lengths", "90,0"], "separated by commas; '0' is not"),
        (["--lengths", "90 12"], "separated by commas; '90 12' is not"),
        (["--lengths", " , "], "separated by commas; there are none"),
        (
            ["--lengths", "300,99999999999999999999"],  # more than int64 holds
            "whole numbers from 1 to 1,099,511,627,776, separated by commas; '99999999999999999999' is not",
        ),
        (["--lengths", f"{2**63 - 1},{2**63 - 1}"], f"separated by commas; '{2**63 - 1}' is not"),  # their sum is -2
        (["--lengths", "9" * 5000], "separated by commas; '999"),
        (["--lengths", "3"], "A micro-batch of 3 tokens cannot be shared by 4 context-parallel ranks"),
        (["--lengths", "300", "--cp", "0"], "cp_size must be a whole number of at least 1, got 0"),
        (
            ["--lengths", "300", "--max-tokens-per-shard", "74"],
            "does not fit 4 ranks of at most 74 tokens each. Raise --max-tokens-per-shard or --cp, or give a shorter",
        ),
        (["--lengths", "300", "--max-token-skew", "1.5"], "max_token_skew must be at least 0 and below 1, got 1.5"),
        (["--lengths", "300", "--crossover", "0"], "The crossover length must be above 0"),
        (["--lengths", "300", "--model", "7B", "--crossover", "5"], "model and crossover were given"),
        (["--lengths", "300", "--profile", "nowhere.json"], "nowhere.json"),
        (["--context", "0"], "The context must be at least 1 token, got 0"),
        (["--lengths", "300", "--png", "no/such/folder/a.png"], "there is no folder"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence) -> None:
    priced = [] if "--crossover" in arguments or "--profile" in arguments else ["--crossover", "8192"]
    result = run(*arguments, *priced)
    assert result.exit_code == 2
    assert sentence in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["shard", "stages"])
def test_lengths_of_a_file_that_cannot_be_are_named(command, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("1000\n99999999999999999999\n")
    model = [] if command == "shard" else ["--model", "550M", "--pp", "2"]
    result = CliRunner().invoke(app, [command, "--lengths", str(path), *model])
    assert result.exit_code == 2 and "Line 2 of lengths.txt is '99999999999999999999'" in result.stderr
    assert "integers from 0 to 1,099,511,627,776, in tokens" in " ".join(result.stderr.split())
    path.write_text("1000\n999\n")
    assert CliRunner().invoke(app, [command, "--lengths", str(path), *model]).exit_code == 0


def test_a_profile_without_collectives_says_so(tmp_path: Path) -> None:
    profile = {
        "schema": "hf_wlb.profile/1",
        "metadata": {"device": "made up", "dtype": "bfloat16", "model": {"kv_width": 8}, "versions": {}},
        "attention": [{"q_len": 10, "kv_len": 10, "forward_seconds": 1.0, "backward_seconds": 2.0}],
        "linear": [{"tokens": 10, "forward_seconds": 1.0, "backward_seconds": 2.0}],
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    result = run("--lengths", "300", "--profile", path)
    assert result.exit_code == 2 and "holds no time of" in result.stderr and "over 4 ranks" in result.stderr


def test_a_context_is_filled_with_whole_documents_but_for_the_last() -> None:
    stored = np.array([300, 0, 500, 0, 200, 900], dtype=np.int32)
    drawn = fill_context(stored, 1500, seed=3)
    assert drawn.dtype == np.int64 and drawn.sum() == 1500
    assert set(drawn[:-1].tolist()) <= {300, 500, 200, 900} and len(set(drawn[:-1].tolist())) == len(drawn) - 1
    assert sorted(fill_context(stored, 10_000).tolist()) == [200, 300, 500, 900]  # all there is
    assert len({tuple(fill_context(sample_lengths(500), 9000, seed).tolist()) for seed in range(5)}) == 5
    for empty in (np.array([], dtype=np.int64), np.array([0, 0])):
        with pytest.raises(ValueError, match="no document with tokens"):
            fill_context(empty, 100)


def test_lengths_given_are_taken_in_their_order() -> None:
    source = read_micro_batch(" 90,12 , 8,", 5)
    assert source.lengths.tolist() == [90, 12, 8] and source.description == "3 documents of 110 tokens, as given"
    assert read_micro_batch(f"007,{2**40}", 5).lengths.tolist() == [7, 2**40]  # the longest there can be


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_shares_of_ranks_add_up_to_the_prediction(cp_size) -> None:
    for result in analyze_shards(MIX, WORKLOAD, cp_size).results.values():
        assert [rank.workload for rank in result.ranks] == pytest.approx(result.plan.predicted.tolist())
        assert [rank.tokens for rank in result.ranks] == result.plan.tokens.tolist()
        assert 0 < result.share_of_ideal <= 1 + 1e-9


def test_shares_by_hand() -> None:
    # Whole on rank 0 (3 tokens) and 4 tokens cut 1, 1, 1, 1: 2 a pair, 10 a token, 3 x 1 / 2 a token exchanged: 6.
    workload = AnalyticWorkload(2.0, 10.0, exchange_seconds_per_token=3.0)
    plan = per_document([4], 2)
    plan = type(plan)(np.array([3, 4]), 2, np.array([0, SHARDED]), plan.edges, "by hand")
    first, second = rank_shares(plan, workload)
    assert (first.local_documents, first.local_tokens, first.head_tokens, first.tail_tokens) == (1, 3, 1, 1)
    assert (first.local_attention, first.sharded_attention, first.linear) == (12.0, 10.0, 50.0)
    assert first.waiting == pytest.approx(6.0 - HIDDEN * 6.0) and HIDDEN * 6.0 < 12.0  # the gathers are hidden
    assert (second.local_attention, second.sharded_attention, second.linear, second.waiting) == (0.0, 10.0, 20.0, 6.0)


def test_headings_name_the_choice() -> None:
    headings = list(strategy_headings(analyze_shards(MIX, WORKLOAD, 4)))
    assert [title.split(":")[0] for title, _, _ in headings] == [
        "per_sequence",
        "per_document",
        "placed, adaptive's choice",
    ]
    assert all("% of ideal" in text and "relative units" in text for _, text, _ in headings)
