"""Checkpoints that do not depend on how a run is split.

Weights are an ordinary Hugging Face checkpoint and the optimizer's state lies beside it by parameter name, so that any
number of processes, split in any way, can go on from it. ``regions`` says which part of a tensor a process holds,
``files`` writes whole tensors and ``reading`` reads parts of them; ``names``, ``weights``, ``adapters`` and
``optimizer`` say what is in the files. With a pipeline a checkpoint is the union of its stages, each of which writes
and reads its own tensors.

No process ever holds more than one file's tensors and the tensor that is being put together.
"""

from hf_wlb.parallel.checkpoint.adapters import gather_adapters, load_adapters
from hf_wlb.parallel.checkpoint.files import MOST_BYTES_PER_FILE, check_folder, write_json
from hf_wlb.parallel.checkpoint.names import all_names, can_save_in_parts, check_names
from hf_wlb.parallel.checkpoint.optimizer import (
    ELEMENTWISE_OPTIM_NAMES,
    check_optimizer,
    has_optimizer,
    load_optimizer,
    save_optimizer,
    saved_by_name,
    verify_groups,
)
from hf_wlb.parallel.checkpoint.weights import has_weights, load_weights, save_weights

__all__ = [
    "ELEMENTWISE_OPTIM_NAMES",
    "MOST_BYTES_PER_FILE",
    "all_names",
    "can_save_in_parts",
    "check_folder",
    "check_names",
    "check_optimizer",
    "gather_adapters",
    "has_optimizer",
    "has_weights",
    "load_adapters",
    "load_optimizer",
    "load_weights",
    "save_optimizer",
    "save_weights",
    "saved_by_name",
    "verify_groups",
    "write_json",
]
