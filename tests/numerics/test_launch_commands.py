"""Launch files as accelerate reads them, and the commands of README and docs/ as their programs do."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch.distributed.run import get_args_parser

from tests.support.pages import blocks, pages, read_page
from tests.support.recipes import load_recipe
from tests.support.source_tree import REPOSITORY


def commands_of(file: str) -> list[str]:
    """Lines of its shell blocks, comments aside; those that end in a backslash go on in the next."""
    lines = [line for block in blocks(read_page(file), "sh") for line in block.replace("\\\n", "").splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = commands_of("docs/launching.md")
#: Those of README and the other pages that start a recipe with sizes of one's own.
OTHER_COMMANDS = [
    line
    for page in pages()
    if page != "docs/launching.md"
    for line in commands_of(page)
    if re.match(r"torchrun .* recipes/llama_long_", line)
]
PARSED = [*COMMANDS, *OTHER_COMMANDS]
LAUNCH = "recipes/launch"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPOSITORY)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def accelerate_launch(words: list[str]) -> Any:
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args


@pytest.mark.parametrize(
    ("name", "processes", "machines", "by_torchrun", "precision"),
    [
        ("cpu.yaml", 1, 1, False, "no"),
        ("cpu_2_processes.yaml", 2, 1, True, "no"),
        ("one_node_8_gpus.yaml", 8, 1, True, "bf16"),
        ("several_nodes.yaml", 16, 2, True, "bf16"),
    ],
)
def test_accelerate_reads_the_launch_files(
    name: str, processes: int, machines: int, by_torchrun: bool, precision: str
) -> None:
    args = accelerate_launch(["--config_file", f"{LAUNCH}/{name}", "script.py", "--use_cpu"])
    assert (args.num_processes, args.num_machines, args.multi_gpu) == (processes, machines, by_torchrun)
    assert args.mixed_precision == precision
    assert not (args.use_fsdp or args.use_deepspeed or args.use_megatron_lm or args.use_parallelism_config)
    assert args.dynamo_backend == "no" and args.training_script_args == ["--use_cpu"]


def test_control_a_wrong_launch_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text((REPOSITORY / LAUNCH / "one_node_8_gpus.yaml").read_text() + "cp_size: 2\n")
    with pytest.raises(ValueError, match="unknown keys"):
        accelerate_launch(["--config_file", str(file), "script.py"])


def started(command: str) -> tuple[int, list[str]]:
    """Processes of all machines together, and the script with its arguments."""
    words = shlex.split(command)
    if words[:2] == ["accelerate", "launch"]:
        args = accelerate_launch(words[2:])
        return args.num_processes, [args.training_script, *args.training_script_args]
    if words[0] == "torchrun":
        args = get_args_parser().parse_args(words[1:])
        return int(args.nproc_per_node), [args.training_script, *args.training_script_args]
    if words[0] == "sbatch":
        place = words.index("recipes/slurm/train.sbatch")
        nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words[:place] else 2
        return 8 * nodes, words[place + 1 :]
    assert words[0] == "python"
    return 1, words[1:]


@pytest.mark.parametrize("command", PARSED, ids=range(len(PARSED)))
def test_commands_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    processes, (script, *arguments) = started(command)
    recipe = load_recipe(Path(script).stem)
    if script == "recipes/memory.py":
        recipe.main(arguments)
        assert "together" in capsys.readouterr().out
        return
    _, training = recipe.parse_arguments([*arguments, "--use_cpu"])  # there may be no GPU here
    if hasattr(training, "parallel_sizes"):
        sizes = training.parallel_sizes(processes)
        assert sizes.total == processes
        assert sizes.pp == 1 or training.gradient_accumulation_steps >= 2 * sizes.pp  # else stages mostly wait
    if "--model" in arguments:
        assert training.learning_rate < 1e-4  # and none of the demonstration's
        assert training.bf16


def test_the_guide_has_commands_for_every_launch_and_recipe() -> None:
    text = "\n".join(COMMANDS)
    for name in ("cpu.yaml", "cpu_2_processes.yaml", "one_node_8_gpus.yaml", "several_nodes.yaml", "train.sbatch"):
        assert name in text
    for name in ("llama_long_context.py", "sft_chat.py", "trl_sft.py", "--pp_size"):
        assert name in text


def test_the_pages_have_commands_for_every_kind_of_parallelism() -> None:
    text = "\n".join(OTHER_COMMANDS)
    assert len(OTHER_COMMANDS) >= 4
    for name in ("--cp_size", "--tp_size", "--pp_size", "--system"):
        assert name in text
