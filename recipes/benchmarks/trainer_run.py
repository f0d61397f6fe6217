"""One run of the trainer's benchmark: ``recipes/llama_long_context.py``, and on what machine it ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hf_wlb.parallel import gather_figures
from hf_wlb.profiling import device_name, library_versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import llama_long_context as recipe


def describe(trainer: Any) -> None:
    """Writes machine.json; all processes must call this together."""
    device = trainer.args.device
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    machine = {
        "device": device_name(device),
        "devices": trainer.args.world_size,
        "attention_kernel": ", ".join(trainer.attention_kernels),
        "peak_memory_gib": max(row[0] for row in gather_figures([peak])),
        "versions": library_versions(),
    }
    if trainer.is_world_process_zero():
        text = json.dumps(machine, indent=1)
        (Path(trainer.args.output_dir) / "machine.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    describe(recipe.main())
