"""Tensor parallelism: every rank holds a slice of each matrix as a plain tensor, as the model's own plan says.

Modules keep their classes and parameters their names, so that whatever wraps or reads the model (DDP, FSDP2, gradient
checkpointing, ``torch.compile``) needs to know nothing. ``plan`` says what is split, ``forwards`` what modules do then,
``communication`` holds the collectives, ``splitting`` puts them together.

A column-wise matrix makes a part of the features from the whole input, a row-wise one takes a part of the features and
makes a part of every output, to be summed; between them, each rank works on its own heads or features:

    x [tokens, 8] -> q, k, v [8 -> 8 / tp] -> attention of own heads -> o [8 / tp -> 8] -> sum over ranks
"""

from hf_wlb.parallel.tensor_parallel.communication import enter_tensor_parallel
from hf_wlb.parallel.tensor_parallel.splitting import check_tensor_parallel, split_model
from hf_wlb.parallel.tensor_parallel.verification import verify_gradients

__all__ = ["check_tensor_parallel", "enter_tensor_parallel", "split_model", "verify_gradients"]
