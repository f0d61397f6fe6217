"""What neighbouring stages send each other: hidden states one way, their gradients the other.

Both sides know every micro-batch's tokens from the plan, so nothing but the tensors themselves travels, and nobody
waits for a device to learn a shape. Only the type of hidden states, which autocast and FSDP2 decide about, is told by
the first stage, once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hf_wlb.parallel.mesh import ParallelMesh

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StageLinks:
    """This stage's connections with the one before and the one behind it.

    Args:
        mesh: This process's place; stages with the same ``dp``, ``cp`` and ``tp`` rank are connected.
        hidden_size: Of the model.
        device: Where tensors are.
    """

    def __init__(self, mesh: ParallelMesh, hidden_size: int, device: torch.device) -> None:
        self._group = mesh.pp_group
        assert self._group is not None, "a pipeline has several stages"
        self._stage, self._stages = mesh.pp_rank, mesh.pp_size
        self._hidden_size, self._device = hidden_size, device
        self._dtype: torch.dtype | None = None
        self._sending: list[tuple[Any, torch.Tensor]] = []  # tensors must live until they are sent

    @property
    def knows_type(self) -> bool:
        """Whether the stages have told each other the type of hidden states."""
        return self._dtype is not None

    def forget_type(self) -> None:
        """To be told anew, because training, evaluation or what is computed in changes."""
        self._dtype = None

    def tell_type(self, first: torch.Tensor | None = None) -> None:
        """Agrees on the type of hidden states; all stages must call this together.

        Args:
            first: On the first stage, what it is about to send.
        """
        told = torch.full((1,), -1 if first is None else _DTYPES.index(first.dtype), device=self._device)
        dist.broadcast(told, group=self._group, group_src=0)
        self._dtype = _DTYPES[int(told)]

    def exchange(self, peer: int, send: torch.Tensor | None = None, tokens: int | None = None) -> torch.Tensor | None:
        """Sends to a neighbour, receives from it, or both at the same time.

        Args:
            peer: The neighbour's stage.
            send: [1, tokens, hidden size], or None.
            tokens: How many to receive; None for nothing.

        Returns:
            What came, [1, tokens, hidden size].

        Raises:
            RuntimeError: If what is to be sent is of another type or shape than the neighbour expects.
        """
        operations, received = [], None
        if send is not None and send.numel():
            operations.append(dist.P2POp(dist.isend, self._checked(send), group=self._group, group_peer=peer))
        if tokens is not None:
            received = torch.empty(1, tokens, self._hidden_size, dtype=self._dtype, device=self._device)
            if tokens:
                operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=peer))
        if operations:
            works = dist.batch_isend_irecv(operations)
            self._sending = [(work, tensor) for work, tensor in self._sending if not work.is_completed()]
            for place, work in enumerate(works):
                # NCCL gives one handle for all; gloo one each, and sends need not be waited for.
                if received is None or (len(works) > 1 and place == 0):
                    self._sending.append((work, operations[0].tensor))
                else:
                    work.wait()
        return received

    def finish(self) -> None:
        """Waits until everything is sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def from_last(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the last stage has, on all stages; they must call this together."""
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        tensor = tensor.detach().contiguous()
        dist.broadcast(tensor, group=self._group, group_src=self._stages - 1)
        return tensor

    def _checked(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != self._dtype or tensor.shape[0] != 1 or tensor.shape[2:] != (self._hidden_size,):
            raise RuntimeError(
                f"stage {self._stage} computed hidden states of {tensor.dtype} {list(tensor.shape)}, but the stages "
                f"agreed on {self._dtype} [1, tokens, {self._hidden_size}]. Set pp_size=1 for this model."
            )
        return tensor.detach().contiguous()
