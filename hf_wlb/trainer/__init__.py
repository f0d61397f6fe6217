"""``WLBTrainer``: a Transformers ``Trainer`` whose micro-batches are planned, and shared out under context parallelism.

``trainer`` is the training loop's part; the others are its bases: ``splitting`` (who holds which part of the model),
``checkpoints``, ``supervision`` (speed, faults), ``evaluation`` and ``training_loss``. ``attention`` says how documents
attend, ``tokens`` which ones a model knows, ``swap`` what a script written for ``Trainer`` means, ``shard_window`` what
context parallelism logs.
"""

from hf_wlb.trainer.splitting import agreed_sizes, check_processes
from hf_wlb.trainer.trainer import WLBTrainer, check_versions

__all__ = ["WLBTrainer", "agreed_sizes", "check_processes", "check_versions"]
