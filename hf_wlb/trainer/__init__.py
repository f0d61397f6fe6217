"""``WLBTrainer``: a Transformers ``Trainer`` whose micro-batches are planned, and shared out under context parallelism.

``trainer`` is the training loop's part, ``evaluation`` what evaluates, ``attention`` how documents attend, and
``shard_window`` what context parallelism logs.
"""

from hf_wlb.trainer.trainer import WLBTrainer, check_versions

__all__ = ["WLBTrainer", "check_versions"]
