"""What starts a planned run: a launch file for accelerate, arguments for the recipe, and the commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_wlb.argument_names import yaml_value
from hf_wlb.simulator.handover import trainer_workload
from hf_wlb.simulator.plan_result import Choice, Training

RECIPE = "recipes/llama_long_context.py"
SLURM_SCRIPT = "recipes/slurm/train.sbatch"
LAUNCH_FILE, ARGUMENTS_FILE, WORKLOAD_FILE = "launch.yaml", "train.yaml", "workload.json"
OWN_DOCUMENTS = "./my-documents.jsonl"

# Of the optimizer and of what is written down: those of recipes/configs/long_context.yaml. Nothing is planned by them.
_NOT_PLANNED: Mapping[str, Any] = {
    "max_steps": 1000,
    "learning_rate": 2e-5,
    "warmup_steps": 50,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_steps": 200,
    "save_total_limit": 2,
    "report_to": "none",
    "seed": 0,
}


@dataclass(frozen=True)
class RunFiles:
    """A run as files.

    Attributes:
        choice: What is to be run.
        model: Preset, or folder or name of a model; a folder as an absolute path, as all paths here, see
            ``from_anywhere``.
        vocab_size: Entries of the tokenizer that the recipe trains for a preset; None for a model with its own.
        gpus_per_node: GPUs of a machine.
        made_by: The command that planned it, for the files' first lines.
        documents: What to train on, in the commands.
        text: The recipe's arguments about these documents' text, such as ``tokenizer``.
    """

    choice: Choice
    model: str
    vocab_size: int | None
    gpus_per_node: int
    made_by: str
    documents: str = OWN_DOCUMENTS
    text: Mapping[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> Training:
        """How it is trained."""
        return self.choice.prediction.training

    @property
    def nodes(self) -> int:
        """Machines."""
        return -(-self.training.split.gpus // self.gpus_per_node)

    def write(self, folder: Path, *, overwrite: bool = False) -> list[Path]:
        """Writes the files.

        Args:
            folder: Where to; it is made if it is not there.
            overwrite: Whether files that are there already may go.

        Returns:
            What was written: launch file, arguments, workload.

        Raises:
            FileExistsError: There is such a file; nothing was written then.
        """
        check_free(folder, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / name for name in (LAUNCH_FILE, ARGUMENTS_FILE)]
        for path, text in zip(written, (self.launch_text(), self.arguments_text(folder)), strict=True):
            path.write_text(text, encoding="utf-8")
        trainer_workload(self.choice.model).save(folder / WORKLOAD_FILE)
        return [*written, folder / WORKLOAD_FILE]

    def launch_text(self) -> str:
        """The launch file: how many processes on how many machines, in which precision; see recipes/launch."""
        several = self.nodes > 1
        settings = {
            "compute_environment": "LOCAL_MACHINE",
            # The only type for which accelerate starts processes by torchrun, one process included.
            "distributed_type": "MULTI_GPU",
            "use_cpu": False,
            "gpu_ids": "all",
            "num_machines": self.nodes,
            "num_processes": self.training.split.gpus,
            "machine_rank": 0,
            "main_process_port": 29500 if several else 0,
            **({"rdzv_backend": "static", "same_network": True} if several else {}),
            "mixed_precision": "bf16",
            "main_training_function": "main",
        }
        comments = {
            "num_processes": "of all machines together" if several else "one a GPU",
            "machine_rank": "overruled on the command line" if several else "",
            "main_process_port": "free on machine 0, and open to the others" if several else "any free one",
        }
        return "\n".join([*self._heading(), *_lines(settings, comments)]) + "\n"

    def arguments_text(self, folder: Path) -> str:
        """The recipe's arguments; ``folder`` is where the workload is written."""
        training, split = self.training, self.training.split
        planned = {
            "context_length": training.context_length,
            "max_document_tokens": training.context_length,
            "max_tokens_per_micro_batch": training.max_tokens_per_micro_batch,
            "gradient_accumulation_steps": training.micro_batches_per_replica,
            "packer": "steady",
            "outlier_tokens": training.outlier_tokens,
            "max_time_gap": training.max_time_gap,
            "cp_strategy": training.sharding,
            "tp_size": split.tp_size,
            "cp_size": split.cp_size,
            "pp_size": split.pp_size,
            **({"pp_stage_layers": list(training.stage_layers)} if split.pp_size > 1 else {}),
            "fsdp": split.fsdp,
            "gradient_checkpointing": training.candidate.gradient_checkpointing,
            "bf16": True,
            "torch_compile": self.choice.model.compiled,
            "workload_profile": _absolute(folder / WORKLOAD_FILE),
        }
        comments = {
            "context_length": "tokens of a micro-batch on average",
            "max_document_tokens": "longer documents are split, and counted",
            "max_tokens_per_micro_batch": "S_max: the most, by memory",
            "gradient_accumulation_steps": f"micro-batches of a step on each of {split.dp_size} replica(s)",
            "outlier_tokens": "documents from this length on may wait for a step that they fit",
            "fsdp": "parameters shared out over replicas and context-parallel ranks",
            "gradient_checkpointing": "recomputation",
            "torch_compile": "decoder layers, as was reckoned with",
            "workload_profile": "what documents cost, as was reckoned with",
        }
        vocabulary = {} if self.vocab_size is None else {"vocab_size": self.vocab_size}
        source = {"model": self.model, **vocabulary, **self.text, "output_dir": "runs/planned"}
        return "\n".join(
            [
                *self._heading(),
                *_lines(source, {"vocab_size": "of the tokenizer trained on the spot: a preset has none of its own"}),
                "",
                *_lines(planned, comments),
                "",
                "# Not planned: change these as you like.",
                *_lines(_NOT_PLANNED, {}),
                "",
            ]
        )

    def commands(self, folder: Path) -> list[str]:
        """What to run: on one machine one command; on several one on each of them, the first and the last here."""
        launch = ["accelerate", "launch", "--config_file", _absolute(folder / LAUNCH_FILE)]
        if self.nodes == 1:
            return [shlex.join([*launch, *self._script(folder)])]
        place = ("--main_process_ip", "ADDRESS_OF_MACHINE_0")
        ranks = ("0", str(self.nodes - 1))
        return [shlex.join([*launch, "--machine_rank", rank, *place, *self._script(folder)]) for rank in ranks]

    def slurm_command(self, folder: Path) -> str:
        """The same under Slurm, whose script counts machines and GPUs itself."""
        gpus = min(self.gpus_per_node, self.training.split.gpus)
        options = ["--nodes", str(self.nodes), "--gpus-per-node", str(gpus)]
        return shlex.join(["sbatch", *options, SLURM_SCRIPT, *self._script(folder)])

    def _script(self, folder: Path) -> list[str]:
        return [RECIPE, "--config", _absolute(folder / ARGUMENTS_FILE), "--dataset", self.documents]

    def _heading(self) -> list[str]:
        found = self.choice.prediction
        return [
            f"# Written by: {self.made_by}",
            f"# {found.training.label}",
            f"# Predicted, not measured: {found.tokens_per_second:,.0f} tokens/s, {found.step_seconds:.3g} s a step, "
            f"{found.memory_bytes / 1e9:.0f} GB a GPU.",
        ]


def from_anywhere(place: str) -> str:
    """A file or folder by its absolute path, as the run may start in another folder; a name stays as it is.

    Args:
        place: What is read from this folder if it is there, and else is a name, on the hub for example.

    >>> from_anywhere("my-organisation/no-folder-of-this-name")
    'my-organisation/no-folder-of-this-name'
    """
    return _absolute(Path(place)) if Path(place).exists() else place


def _absolute(path: Path) -> str:
    return path.resolve().as_posix()


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuses a folder in which there are files of these names.

    Raises:
        FileExistsError: There are, and they may not go.
        NotADirectoryError: The folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, so nothing can be written into it; give another --output")
    there = [name for name in (LAUNCH_FILE, ARGUMENTS_FILE, WORKLOAD_FILE) if (folder / name).exists()]
    if there and not overwrite:
        raise FileExistsError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} in {folder} already; give --overwrite to replace "
            f"{'it' if len(there) == 1 else 'them'}, or another --output"
        )


def _lines(settings: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    written = {name: f"{name}: {yaml_value(value)}" for name, value in settings.items()}
    return [f"{text:<34} # {comments[name]}" if comments.get(name) else text for name, text in written.items()]
