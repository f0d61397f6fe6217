"""Launch files, the Slurm script and docs/launching.md, as far as they can be checked without torch."""

import ast
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_wlb.simulator.split import Split
from tests.support.recipes import load_recipe
from tests.support.source_tree import REPOSITORY, python_files

LAUNCH = REPOSITORY / "recipes" / "launch"
SBATCH = REPOSITORY / "recipes" / "slurm" / "train.sbatch"
GUIDE = (REPOSITORY / "docs" / "launching.md").read_text(encoding="utf-8")
FILES = {
    "cpu.yaml": 1,
    "cpu_2_processes.yaml": 2,
    "one_node_8_gpus.yaml": 8,
    "several_nodes.yaml": 16,
}
#: What WLBTrainer would refuse, or take over: sizes come from the script's arguments.
NOT_OURS = {"parallelism_config", "fsdp_config", "deepspeed_config", "megatron_lm_config", "dynamo_config"}
SHAPES = {
    "1B": (2048, 8192, 32, 8, 64, 16, 128256, True),
    "8B": (4096, 14336, 32, 8, 128, 32, 128256, False),
    "32B": (5120, 25600, 64, 8, 128, 64, 151936, False),
    "70B": (8192, 28672, 64, 8, 128, 80, 128256, False),
}


def config_of(name: str) -> SimpleNamespace:
    """A Llama's of one of these shapes."""
    hidden, ffn, heads, kv_heads, head, layers, vocabulary, tied = SHAPES[name]
    return SimpleNamespace(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def test_launch_files_hold_processes_and_precision_only() -> None:
    assert {path.name for path in LAUNCH.iterdir()} == set(FILES)
    for name, processes in FILES.items():
        settings = yaml.safe_load((LAUNCH / name).read_text())
        assert settings["num_processes"] == processes
        assert not NOT_OURS & set(settings)
        assert settings["mixed_precision"] == ("no" if name.startswith("cpu") else "bf16")


# ---- the Slurm script ----


def fake_slurm(folder: Path) -> dict[str, str]:
    """Commands that do what Slurm's do on one machine, and an accelerate that writes down how it was called."""
    commands = {
        "scontrol": "echo node-7\necho node-8\n",
        "srun": '[ "$1" = --kill-on-bad-exit=1 ] && shift\n'
        'for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" || exit 1; done\n',
        "accelerate": f'printf "%s\\n" "$@" > "{folder}/call-$SLURM_NODEID"\nexit "${{FAIL:-0}}"\n',
    }
    for name, text in commands.items():
        (folder / name).write_text("#!/bin/bash\n" + text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)}


def submit(environment: dict[str, str], *arguments: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
    job = {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "x"}
    command = ["bash", str(SBATCH), *arguments]
    return subprocess.run(command, env={**environment, **job}, capture_output=True, text=True, timeout=30, check=False)


def test_the_slurm_script_starts_a_launcher_on_every_node(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(SBATCH)], check=False).returncode == 0
    done = submit(fake_slurm(tmp_path), "recipes/sft_chat.py", "--model", "my model")
    assert done.returncode == 0, done.stderr
    for node in range(2):
        call = (tmp_path / f"call-{node}").read_text().splitlines()
        assert call[0] == "launch" and call[-3:] == ["recipes/sft_chat.py", "--model", "my model"]
        assert dict(zip(call[1:-3:2], call[2:-3:2], strict=True)) == {
            "--config_file": "recipes/launch/several_nodes.yaml",
            "--num_machines": "2",
            "--num_processes": "8",
            "--machine_rank": str(node),
            "--main_process_ip": "node-7",
            "--main_process_port": "21234",
        }


def test_the_slurm_script_fails_where_it_must(tmp_path: Path) -> None:
    environment = fake_slurm(tmp_path)
    done = submit(environment)
    assert done.returncode == 2 and "Name a recipe and its arguments" in done.stderr
    assert submit({**environment, "FAIL": "3"}, "recipes/sft_chat.py", nodes=1).returncode != 0


# ---- the guide ----


def test_the_guide_names_files_that_are_there() -> None:
    named = set(re.findall(r"recipes/[\w/]+\.(?:py|yaml|sbatch)", GUIDE))
    assert {f"recipes/launch/{name}" for name in FILES} <= named
    assert [name for name in sorted(named) if not (REPOSITORY / name).is_file()] == []


def quoted_messages() -> list[str]:
    table = GUIDE.split("| message has |")[1]
    return re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)


def test_the_guide_quotes_messages_that_there_are() -> None:
    """Each is part of a string of the package or the recipes, places that are filled in aside."""
    strings = []
    for path in python_files(REPOSITORY / "hf_wlb", REPOSITORY / "recipes"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    everything = "\n".join(strings)
    quoted = quoted_messages()
    assert len(quoted) >= 10
    assert [message for message in quoted if message not in everything] == []
    assert "a message that nobody wrote, at least not in one piece" not in everything  # control


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (\d+B) \| (\d+)K \| (\d+) \| `(.*?)` \| (yes|no) \| (\d+) \|$", GUIDE, re.M)
)
def test_the_guides_table_is_what_the_formula_gives(row: tuple[str, ...]) -> None:
    memory = load_recipe("memory")
    model, context, gpus, split, recomputation, expected = row
    sizes = {name: int(size) for name, size in re.findall(r"--(cp_size|tp_size) (\d+)", split)}
    inner = sizes.get("tp_size", 1) * sizes.get("cp_size", 1)
    assert int(gpus) % inner == 0
    whole = Split(**sizes, dp_size=int(gpus) // inner, fsdp="--fsdp" in split)
    (use,) = memory.estimate(
        config_of(model), whole, context_length=int(context) * 1024, recomputation=recomputation == "yes"
    )
    assert round(use.total / 1e9) == int(expected) <= 74


def test_the_formula_by_hand() -> None:
    """Llama 3 8B, 8 GPUs, 64K over 4 of them."""
    memory = load_recipe("memory")
    (use,) = memory.estimate(config_of("8B"), Split(cp_size=4, dp_size=2, fsdp=True), context_length=65536)
    assert use.states == pytest.approx(16 * 8.03e9 / 8, rel=1e-3)
    assert use.activations == pytest.approx(20480 * (2 * 4096 * 32 + 200_704))
    assert use.exchange == pytest.approx(12 * 1024 * 81920)
    (alone,) = memory.estimate(config_of("8B"), Split(), context_length=65536)
    assert alone.exchange == 0


def test_stages_by_hand() -> None:
    """The first of two holds a large and an average micro-batch, and more layers where it is told so."""
    memory = load_recipe("memory")
    first, last = memory.estimate(config_of("8B"), Split(pp_size=2), context_length=65536, stage_layers=[20, 12])
    kept, working = 4 * 4096, 81920 * 200_704
    assert first.activations == pytest.approx((81920 + 65536) * kept * 20 + working)
    assert last.activations == pytest.approx(81920 * kept * 12 + working)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert first.states == pytest.approx(16 * (20 * layer + 4096 * 128256))


def test_the_command_shows_every_stage(capsys) -> None:
    memory = load_recipe("memory")
    memory.main(["--model", "7B", "--context_length", "131072", "--processes", "8", "--pp_size", "4", "--cp_size", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "0", "stage", "1", "stage", "2", "stage", "3"]
    sums = [float(word) for word in lines[-1].split()[1:-1]]
    assert len(sums) == 4 and sums == sorted(sums, reverse=True) and lines[-1].endswith(" GB")
    for words, sentence in (
        (["--processes", "6", "--pp_size", "4"], "the sizes make 4, which does not divide 6 processes"),
        (["--pp_size", "0"], "sizes are at least 1, got --pp_size 0"),
        (["--pp_size", "2", "--pp_stage_layers", "20", "20"], "adds up to 40 layers"),
    ):
        with pytest.raises(SystemExit):
            memory.main(["--model", "7B", "--context_length", "65536", *words])
        assert sentence in " ".join(capsys.readouterr().err.split())
