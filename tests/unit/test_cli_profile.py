"""``hf-wlb profile``: what it refuses before it measures, and the tables and the picture of a made-up profile."""

import copy
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_wlb.analysis.profile_tables import pair_flops, profile_tables
from hf_wlb.cli import app
from hf_wlb.plots import attention_rates, plot_attention_rates
from hf_wlb.workload import ProfiledWorkload
from tests.unit.test_cli_sharding import rows_of

MODEL = {"heads": 8, "kv_heads": 2, "head_size": 64, "value_head_size": 64, "kernel": "made up", "tp_size": 1}
FLOPS = 4 * 8 * 64  # of a pair, forward


def attention(queries: int, keys: int, rate: float) -> dict[str, float]:
    """At so many FLOP/s forward, half of it backward."""
    pairs = queries * (keys - (queries - 1) / 2)
    times = {"forward_seconds": pairs * FLOPS / rate, "backward_seconds": 2.5 * pairs * FLOPS / (rate / 2)}
    return {"q_len": queries, "kv_len": keys, **times}


def linear(tokens: int, microseconds: float) -> dict[str, float]:
    seconds = tokens * microseconds * 1e-6
    return {"tokens": tokens, "forward_seconds": seconds / 4, "backward_seconds": seconds * 3 / 4}


PROFILE = {
    "schema": "hf_wlb.profile/1",
    "metadata": {
        "device": "made up",
        "dtype": "bfloat16",
        "model": MODEL,
        "versions": {},
        "held_out": {"documents": {"count": 9, "median_error": 0.0312, "p90_error": 0.1}},
    },
    "layers": [{"count": 2, "window": None}],
    "attention": [attention(64, 64, 1e14), attention(64, 4096, 1e14), attention(4096, 4096, 4e14)],
    "linear": [linear(1024, 3.0), linear(4096, 2.0)],
    "head": [linear(4096, 1.0)],
    "embedding": [linear(4096, 0.5)],
    "collectives": [
        {"operation": "all_gather", "group_size": 4, "bytes": 2**20, "seconds": 1e-4},
        {"operation": "all_gather", "group_size": 4, "bytes": 2**28, "seconds": 1e-3},
        {"operation": "all_reduce", "group_size": 4, "bytes": 2**28, "seconds": 2e-3},
        {"operation": "key_value_exchange", "group_size": 4, "bytes": 2**28, "seconds": 3e-3},
        {"operation": "send_recv", "group_size": 2, "bytes": 2**28, "seconds": 1e-3},
    ],
}


def shown(profile: dict, columns: int = 80) -> str:
    console = Console(width=columns, record=True)
    for part in profile_tables(ProfiledWorkload.from_dict(profile)):
        console.print(part)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= columns
    return text


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_say_what_costs_what(columns: int) -> None:
    text = shown(PROFILE, columns)
    assert pair_flops(MODEL) == FLOPS
    assert [row[0:2] + row[4:] for row in rows_of(text, "Attention, one layer")] == [
        ["64", "64", "100.0", "50.0"],
        ["4,096", "4,096", "400.0", "200.0"],
        ["64", "4,096", "100.0", "50.0"],
    ]
    assert rows_of(text, "Links") == [
        ["all_gather", "4", "1", "0.1", "7.86"],  # three quarters of it over 0.1 ms
        ["all_gather", "4", "256.0", "1", "201.3"],
        ["all_reduce", "4", "256.0", "2", "201.3"],
        ["key_value_exchange", "4", "256.0", "3"],
        ["send_recv", "2", "256.0", "1", "268.4"],
    ]
    assert rows_of(text, "Shapes that are not in the profile") == [["documents", "9", "3.1%", "10.0%"]]
    one_line = " ".join(text.split())
    assert "Linear work: 5.5 us a token over the whole model" in one_line  # two layers of 2, head and embedding
    length = ProfiledWorkload.from_dict(PROFILE).crossover_length
    assert f"a document's attention costs as much at {length:,.0f} tokens." in one_line


def test_a_slow_device_is_shown_in_smaller_units() -> None:
    slow = copy.deepcopy(PROFILE)
    for sample in slow["attention"]:
        sample["forward_seconds"] *= 1e4
        sample["backward_seconds"] *= 1e4
    assert "GFLOP/s" in shown(slow) and "TFLOP/s" in shown(PROFILE)
    del slow["collectives"], slow["metadata"]["held_out"]
    assert "Links" not in shown(slow) and "Shapes that are not" not in shown(slow)


def test_the_picture_shows_the_rates_that_were_measured(tmp_path: Path) -> None:
    profile = ProfiledWorkload.from_dict(PROFILE).profile
    queries, keys, rates = attention_rates(profile)
    assert queries[0] == keys[0] == 64 and queries[-1] == keys[-1] == 4096
    # 3.5 FLOPs: one at the forward's rate, 2.5 at half of it.
    assert rates[0, 0] == pytest.approx(100 * 3.5 / 6) and rates[-1, -1] == pytest.approx(400 * 3.5 / 6)
    assert rates[-1, 0] == pytest.approx(100 * 3.5 / 6)
    assert np.isnan(rates[0, 1:]).all() and not np.isnan(np.diag(rates)).any()
    # Layers are many and other work costs time, too: neither is in the picture.
    plain = ProfiledWorkload.from_dict({**PROFILE, "layers": [{"count": 7, "window": 128}], "linear": []}).profile
    assert np.array_equal(attention_rates(plain)[2], rates, equal_nan=True)
    first = plot_attention_rates(profile, tmp_path / "a" / "one.png").read_bytes()
    assert first.startswith(b"\x89PNG") and first == plot_attention_rates(profile, tmp_path / "two.png").read_bytes()


def test_a_profile_without_head_sizes_has_no_picture(tmp_path: Path) -> None:
    bare = copy.deepcopy(PROFILE)
    del bare["metadata"]["model"]["heads"], bare["metadata"]["model"]["value_head_size"]
    with pytest.raises(ValueError, match="does not say heads, value_head_size, so its attention has no rate"):
        plot_attention_rates(ProfiledWorkload.from_dict(bare).profile, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "tiny", "--seconds", "0"], "--seconds must be above 0, got 0"),
        (["--model", "tiny", "--seconds", "nan"], "--seconds must be above 0, got nan"),
        (["--model", "tiny", "--json", "no/such/folder/a.json"], "there is no folder no/such/folder; make it first"),
        (["--model", "tiny", "--png", "no/such/folder/a.png"], "there is no folder no/such/folder; make it first"),
        (["--model", "tiny", "--dtype", "int8"], "--dtype must be one of bfloat16, float16, float32, got 'int8'"),
        (["--model", "tiny", "--device", "tpu"], "--device must be cpu or, where there is a GPU, cuda; got 'tpu'"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 2
    assert sentence in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_options_out_of_range_are_refused() -> None:
    for arguments in ([], ["--model", "tiny", "--tp", "0"], ["--model", "tiny", "--longest", "63"]):
        result = CliRunner().invoke(app, ["profile", *arguments])
        assert result.exit_code == 2 and not result.stdout
