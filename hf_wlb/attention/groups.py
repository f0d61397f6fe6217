"""In how many groups of KV heads keys and values are exchanged, and what that takes: times and bytes, no tensors.

More groups hold less memory at a time, but every group's kernel call ends with processors of the GPU waiting for the
last blocks. So there are as few as memory allows: beyond its local q, k, v and output and their gradients, a layer may
take ``GATHERED_FACTOR`` times the keys and values of all sharded documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

#: What a layer may take beyond its local tensors, over keys and values of the micro-batch's sharded documents.
GATHERED_FACTOR = 1.25
#: Bytes that it may take in any case: fewer are not worth small kernel calls and many small exchanges.
FREE_BYTES = 64 * 2**20
#: Of groups that memory does not ask for: gathered bytes of one, fewest queries times heads of its kernel call, and
#: most groups. They hide an exchange that is long.
GROUP_BYTES = 192 * 2**20
GROUP_QUERIES = 2**17
MOST_GROUPS = 8

_ACCUMULATED = 4  # bytes of what kernels add up in, float32
_PER_QUERY = 16  # bytes a query and head: the log-sum-exp, its copy for a call, and what kernels make of it twice


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """KV heads that are attended to together, and the query heads that read them."""

    kv_heads: slice
    heads: slice


@dataclass(frozen=True, slots=True)
class Backward:
    """How backward exchanges keys and values again.

    Attributes:
        groups: How many groups of KV heads.
        overlap: Whether a group's gradients are added up over the ranks during the next group's kernel call; if not,
            before it, which takes less memory and more time.
    """

    groups: int
    overlap: bool


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """What a call's memory follows from: the same figures on all ranks, so that all exchange in the same groups.

    Attributes:
        padded: Tokens that every rank sends.
        cp_size: Ranks.
        gathered_tokens: Tokens of all sharded documents.
        heads: Query heads.
        kv_heads: KV heads.
        head_size: Of queries and keys.
        value_head_size: Of values.
        item: Bytes of a number.

    90,000 tokens over 4 ranks, 32 query heads:
        >>> sizes = ExchangeSizes(22_522, 4, 90_000, heads=32, kv_heads=8, head_size=128, value_head_size=128, item=2)
        >>> sizes.forward_groups(), sizes.backward()
        (2, Backward(groups=8, overlap=True))
        >>> [round(sizes.backward_bytes(groups) / sizes.gathered_bytes, 2) for groups in (1, 2, 4, 8)]
        [5.53, 4.02, 2.32, 1.16]
    """

    padded: int
    cp_size: int
    gathered_tokens: int
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    item: int

    @property
    def gathered_bytes(self) -> int:
        """Keys and values of all sharded documents."""
        return self.gathered_tokens * self._kv_width(self.kv_heads) * self.item

    @property
    def allowed(self) -> float:
        """Bytes that a layer may take beyond its local tensors and their gradients."""
        return max(GATHERED_FACTOR * self.gathered_bytes, FREE_BYTES)

    def _kv_width(self, kv_heads: int) -> int:
        return kv_heads * (self.head_size + self.value_head_size)

    def _buffers(self, groups: int) -> float:
        """Bytes of all ranks' keys and values of a group of KV heads, padding included, rank by rank."""
        return self.padded * self.cp_size * self._kv_width(self.kv_heads) * self.item / groups

    def _gather(self, groups: int) -> float:
        """A group's gather under way: what comes and what is sent."""
        return self._buffers(groups) * (1 + 1 / self.cp_size)

    def _reduction(self, groups: int) -> float:
        """A group's reduction under way: what comes and what is sent, both of every rank."""
        return 2 * self._buffers(groups)

    @property
    def _picked_tokens(self) -> float:
        """Keys that a rank's head and tail chunks read, of documents that are cut evenly."""
        return self.gathered_tokens * (1 + 1 / (2 * self.cp_size))

    def _picked(self, groups: int) -> float:
        return self._picked_tokens * self._kv_width(self.kv_heads) * self.item / groups

    def _workspace(self, queries: int, keys: float, parts: int) -> float:
        """What a backward call of one of so many parts of the heads takes besides its arguments and results.

        As FlashAttention 4 does it: dq is added up in float32, dk and dv are where query heads share KV heads. Which
        kernel is at hand is not asked, because ranks may differ in what is installed.
        """
        kv_heads = math.ceil(self.kv_heads / parts)
        heads = kv_heads * self.heads // self.kv_heads
        dq = queries * heads * self.head_size
        dkv = keys * self._kv_width(kv_heads) if self.heads > self.kv_heads else 0.0
        apart = dq * self.item if parts > 1 else 0  # for some heads only, dq is made in memory of its own first
        return _ACCUMULATED * (dq + dkv) + _PER_QUERY * queries * heads + apart

    def forward_bytes(self, groups: int) -> float:
        """Most that forward holds at a time beyond q, k, v and the output.

        It is one of

        - picking a group's keys, with both gathered, or its values, with those and the picked keys;
        - the kernel call, which reads what was picked, into memory of its own, while the next group is gathered.
        """
        picked, gather = self._picked(groups), self._gather(groups)
        attending = picked
        if groups > 1:
            attending += gather + self.padded * self.heads * self.value_head_size * self.item / groups
        return max(gather + picked / 2, gather / 2 + picked, attending)

    def backward_bytes(self, groups: int, overlap: bool = True) -> float:
        """Most that backward holds at a time beyond local tensors, where keys and values are gathered again.

        It is one of

        - a group's kernel call: what was picked for it, as much for its gradients, the kernel's workspace, the next
          group's gather, and with ``overlap`` the reduction of the group before;
        - the beginning of its reduction: the next group's gather, the reduction, and picked gradients of values.
        """
        picked, gather, reduction = self._picked(groups), self._gather(groups), self._reduction(groups)
        ahead = gather if groups > 1 else 0.0
        under_way = ahead + reduction if overlap and groups > 2 else max(ahead, reduction * (overlap and groups > 1))
        attending = 2 * picked + self._workspace(self.padded, self._picked_tokens, groups) + under_way
        return max(attending, ahead + reduction + picked / 2)

    def kept_groups(self) -> int:
        """In how many groups to exchange, both ways, where gathered keys and values are kept."""
        by_bytes = math.ceil(self._buffers(1) / GROUP_BYTES)
        most = max(1, min(by_bytes, self.padded * self.heads // GROUP_QUERIES, MOST_GROUPS))
        return max(groups for groups in _divisors(self.kv_heads) if groups <= most)

    def forward_groups(self) -> int:
        """In how many groups to exchange in forward: gradients are not there yet, so more fits than in backward."""
        gradients = self.padded * (self.heads * self.head_size + self._kv_width(self.kv_heads)) * self.item
        counts = [groups for groups in _divisors(self.kv_heads) if groups >= self.kept_groups()]
        fitting = (groups for groups in counts if self.forward_bytes(groups) <= self.allowed + gradients)
        return next(fitting, self.kv_heads)

    def backward(self) -> Backward:
        """The fewest groups that fit; one KV head at a time and no overlap where none does."""
        for groups in _divisors(self.kv_heads):
            if self.backward_bytes(groups) <= self.allowed:
                return Backward(groups, overlap=True)
        return Backward(self.kv_heads, overlap=False)

    def local_parts(self, tokens: int, groups: int) -> int:
        """In how many parts backward attends to a rank's local documents, some heads after the other.

        Two, so that some hide the first gather and some the last reduction; more where memory asks for it and they are
        not too small for a GPU; one where there is one KV head. Nothing that ranks do together depends on it.

        Args:
            tokens: Of the rank's local documents.
            groups: In which backward exchanges.
        """
        most = min(max(2, tokens * self.heads // GROUP_QUERIES), self.kv_heads)
        for parts in range(2, most):
            apart = tokens * self._kv_width(math.ceil(self.kv_heads / parts)) * self.item  # dk and dv, at first
            if self._workspace(tokens, tokens, parts) + apart + self._reduction(groups) <= self.allowed:
                return parts
        return most


def _divisors(count: int) -> list[int]:
    """Groups are of one size: the largest needs the memory, and small ones are no faster."""
    return [number for number in range(1, count + 1) if count % number == 0]


def head_groups(count: int, heads: int, kv_heads: int) -> list[HeadGroup]:
    """KV heads dealt evenly to ``count`` groups, at most as many as there are.

    >>> [(group.kv_heads, group.heads) for group in head_groups(2, heads=6, kv_heads=3)]
    [(slice(0, 1, None), slice(0, 2, None)), (slice(1, 3, None), slice(2, 6, None))]
    """
    count = min(count, kv_heads)
    bounds = [kv_heads * number // count for number in range(count + 1)]
    shared = heads // kv_heads
    return [HeadGroup(slice(first, last), slice(first * shared, last * shared)) for first, last in pairwise(bounds)]
