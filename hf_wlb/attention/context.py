"""What an attention call needs besides its tensors: the micro-batch's plan as tensors, and how this process attends.

``ShardTensors`` changes with every micro-batch and travels with it; ``AttentionContext`` is made once. Both are
arguments of the model's forward, never globals: gradient checkpointing replays them, and a pipeline stage has several
micro-batches in flight. Neither is to be changed. They are no frozen dataclasses all the same: torch.compile of torch
2.11 looks into every field of one that a compiled layer is given, and would compile it anew for every other number of
sharded documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from hf_wlb.attention.kernels import AttentionKernel
from hf_wlb.attention.meter import KernelMeter
from hf_wlb.attention.segments import Segments
from hf_wlb.sharding import Rows, ShardLayout


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> torch.Tensor:
        """Its result, once it is there for the current stream."""


class PendingSum(Protocol):
    """A reduction under way."""

    def wait(self, into: torch.Tensor) -> None:
        """Write the first ``len(into)`` rows of its result into memory, for the current stream."""


class KeyValueExchange(Protocol):
    """What context-parallel ranks do together; ``hf_wlb.parallel`` has the one over a process group."""

    @property
    def rank(self) -> int:
        """This process among them."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, part: torch.Tensor) -> Pending:
        """Start gathering ``part`` [tokens, ...], the same shape everywhere, to [size * tokens, ...], rank by rank."""

    def reduce_scatter(self, parts: torch.Tensor) -> PendingSum:
        """Start adding up ``parts`` [size * tokens, ...] over the ranks; each gets its own [tokens, ...].

        Half precision is added up in float32 and rounded once.
        """

    def agree(self, shard: ShardTensors, call: str, problem: str | None) -> None:
        """Compare the plan and how it is attended to over the ranks, in every layer before anything is exchanged.

        Whether anything is compared is up to it, but must not depend on what a single rank was given.

        Args:
            shard: This rank's plan.
            call: What else must be the same on all ranks, in words.
            problem: What this rank found wrong, or None.

        Raises:
            ValueError: If another rank has a problem, and on every rank without one if they differ. A rank with a
                problem comes back and raises that itself.
        """


@dataclass(eq=False)
class ShardTensors:
    """One rank's plan of a micro-batch as tensors; see ``hf_wlb.sharding.ShardLayout``.

    Attributes:
        rank: The context-parallel rank it is for.
        cp_size: Ranks that share the micro-batch.
        local: Local documents over the shard's own keys; their tokens come first.
        chunks: Head chunks, then tail chunks, over the keys that ``order`` picks.
        order: int64 [keys of chunks], place of each in the gathered buffer.
        inverse: int64 [cp_size * padded], which of these keys each place in the gathered buffer is, or their number.
        overlaps: Where head and tail chunks read the same keys, (first for heads, first for tails, how many).
        local_tokens: Tokens of local documents.
        exchanged_tokens: Tokens of chunks.
        padded: Tokens that every rank sends in an exchange.
        gathered_tokens: Tokens of all sharded documents.
        digest: Of the plan, the same on every rank.
    """

    rank: int
    cp_size: int
    local: Segments
    chunks: Segments
    order: torch.Tensor
    inverse: torch.Tensor
    overlaps: tuple[tuple[int, int, int], ...]
    local_tokens: int
    exchanged_tokens: int
    padded: int
    gathered_tokens: int
    digest: int = 0

    @classmethod
    def of(cls, layout: ShardLayout, device: torch.device | str = "cpu") -> ShardTensors:
        """The tensors of a layout."""
        tensors = cls(
            rank=layout.rank,
            cp_size=layout.cp_size,
            local=_segments(layout.local),
            chunks=_segments(layout.chunks),
            order=torch.from_numpy(layout.order),
            inverse=torch.from_numpy(layout.inverse),
            overlaps=tuple((head, tail, count) for head, tail, count in layout.overlaps.tolist()),
            local_tokens=layout.local_tokens,
            exchanged_tokens=layout.exchanged_tokens,
            padded=layout.padded,
            gathered_tokens=layout.gathered,
            digest=layout.digest,
        )
        return tensors.to(device)

    @classmethod
    def whole(cls, cu_seq_lens: torch.Tensor, max_length: int, tokens: int) -> ShardTensors:
        """All documents on this rank, from their bounds (int32 [documents + 1])."""
        local = Segments(cu_seq_lens, cu_seq_lens, max_length, max_length)
        nothing = Segments(cu_seq_lens[:1], cu_seq_lens[:1], 0, 0)
        return cls(0, 1, local, nothing, *(cu_seq_lens[:0].long(),) * 2, (), tokens, 0, 0, 0)

    @property
    def tokens(self) -> int:
        """Tokens of the shard."""
        return self.local_tokens + self.exchanged_tokens

    @cached_property
    def overlapping_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All pairs of rows that ``overlaps`` tells of: of head chunks and of tail chunks, int64."""
        overlaps = torch.tensor(self.overlaps, device="cpu")
        if self.order.is_cuda:  # from other memory it would be copied once the device has done all before
            overlaps = overlaps.pin_memory()
        heads, tails, counts = overlaps.to(self.order.device, non_blocking=True).unbind(1)
        pairs = sum(count for *_, count in self.overlaps)
        within = torch.arange(pairs, device=self.order.device)
        within -= (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=pairs)
        first, second = (rows.repeat_interleave(counts, output_size=pairs) + within for rows in (heads, tails))
        return first, second

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ShardTensors:
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ShardTensors:
        """The same in pinned memory, as data loaders ask for."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ShardTensors:
        local, chunks = (replace(part, q=change(part.q), k=change(part.k)) for part in (self.local, self.chunks))
        order, inverse = change(self.order), change(self.inverse)
        return replace(self, local=local, chunks=chunks, order=order, inverse=inverse)


def _segments(rows: Rows) -> Segments:
    queries, keys = torch.from_numpy(rows.queries), torch.from_numpy(rows.keys)
    return Segments(queries, keys, rows.longest_query, rows.longest_keys)


@dataclass(eq=False)
class AttentionContext:
    """How this process attends: made once and passed to every forward as ``wlb_context``.

    Attributes:
        kernel: The attention kernel; None chooses the fastest one that is installed and can do what is asked.
        exchange: Keys and values with the other context-parallel ranks; None where there are none.
        kv_head_groups: Groups of KV heads that are exchanged one after the other: the exchange of one hides behind the
            attention of the one before, and with ``regather`` only one or two groups' gathered keys and values are in
            memory. Clipped to the number of KV heads; the same in forward and backward. None chooses them for every
            micro-batch: in forward by how much is gathered, in backward with ``regather`` the fewest whose peak memory
            is within 1.25 times the gathered keys and values besides local q, k, v, output and their gradients, one KV
            head each if none is. See ``hf_wlb.attention.groups``.
        regather: Exchange keys and values again in backward instead of keeping them from forward to backward. Without
            it a layer holds what its chunks read in between, an eighth more than all that is gathered on four ranks.
        deterministic: Whether gradients must be the same bits every time.
        meter: Takes the time of attention kernels, waiting for others excluded.

    Raises:
        ValueError: For fewer than one group.
    """

    kernel: AttentionKernel | None = None
    exchange: KeyValueExchange | None = None
    kv_head_groups: int | None = None
    regather: bool = True
    deterministic: bool = False
    meter: KernelMeter | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kv_head_groups is not None and self.kv_head_groups < 1:
            raise ValueError(f"kv_head_groups must be at least 1, or None, got {self.kv_head_groups}.")

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return 1 if self.exchange is None else self.exchange.size

    @property
    def cp_rank(self) -> int:
        """This process among them."""
        return 0 if self.exchange is None else self.exchange.rank
