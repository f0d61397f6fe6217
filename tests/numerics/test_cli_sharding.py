"""``hf-wlb shard`` with models: pricing them needs Transformers configs."""

from typer.testing import CliRunner

from hf_wlb.cli import app


def flat(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["shard", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_without_a_model_a_preset_is_assumed_and_said() -> None:
    assumed = flat("--lengths", "90000,12000,800")
    assert "7B on h100-flash-attn-4, by FLOPs, an assumption (--model or --profile say better)" in assumed
    given = flat("--lengths", "90000,12000,800", "--model", "7B")
    assert "an assumption" not in given
    assert given.split("Layout:")[1] == assumed.split("Layout:")[1]


def test_checkpointing_and_hardware_change_the_prices() -> None:
    outputs = [
        flat("--lengths", "90000,12000,800", "--model", "550M", *more)
        for more in ([], ["--gradient-checkpointing"], ["--hardware", "h100"])
    ]
    assert len({output.split("Layout:")[1] for output in outputs}) == 3
