"""The order in which documents are visited."""

import hashlib
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hf_wlb.lengths.arrays import IntArray


@runtime_checkable
class Order(Protocol):
    """The order in which documents are visited, readable from any place without replaying what came before.

    Attributes:
        fingerprint: Text that is equal exactly when two orders visit the same documents in the same order.
    """

    fingerprint: str

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def block(self, start: int, stop: int) -> IntArray:
        """Return the document indices at places ``start`` up to ``stop`` (exclusive), int64."""
        ...


class StoredOrder:
    """Visit documents as they are stored: 0, 1, 2, ...

    Args:
        n: Number of documents.

    Raises:
        ValueError: If ``n`` is negative or above 2**40.

    Example:
        >>> StoredOrder(5).block(1, 4)
        array([1, 2, 3])
    """

    def __init__(self, n: int) -> None:
        self._n = _checked_size(n)
        self.fingerprint = f"stored/1:n={n}"

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._n

    def block(self, start: int, stop: int) -> IntArray:
        """Return ``start, ..., stop - 1``; see :meth:`Order.block`."""
        _check_range(start, stop, self._n)
        return np.arange(start, stop, dtype=np.int64)


_ROUNDS = 8
_SUB_BLOCK = 1 << 15  # entries permuted at a time, so that the temporaries stay in the processor's cache


class RandomOrder:
    """Visit documents in a pseudo-random order that takes no memory and can be entered at any place.

    A Feistel network permutes the numbers below the power of two that holds ``n``; a result of ``n`` or
    more is permuted again until it falls below ("cycle walking"), which keeps the whole a permutation of
    ``range(n)``. Eight rounds are for evenness, not secrecy. The order is the same on every machine and
    with every version of NumPy.

    Args:
        n: Number of documents, 0 to 2**40.
        seed: Any integer.
        epoch: Any integer; every epoch has its own order.

    Raises:
        ValueError: If ``n`` is negative or above 2**40.

    Example:
        >>> order = RandomOrder(6, seed=0, epoch=0)
        >>> sorted(order.block(0, 6).tolist())
        [0, 1, 2, 3, 4, 5]
        >>> order.block(0, 6).tolist() == order.block(0, 2).tolist() + order.block(2, 6).tolist()
        True
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n = _checked_size(n)
        self.fingerprint = f"random/1:n={n}:seed={seed}:epoch={epoch}"
        bits = max((n - 1).bit_length(), 2)
        self._high_bits, self._low_bits = bits - bits // 2, bits // 2
        key = hashlib.blake2b(f"hf_wlb.RandomOrder/1 {seed} {epoch}".encode(), digest_size=_ROUNDS * 8)
        self._keys = np.frombuffer(key.digest(), dtype="<u8").astype(np.uint64)

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._n

    def block(self, start: int, stop: int) -> IntArray:
        """Return the document indices at places ``start`` to ``stop - 1``; see :meth:`Order.block`."""
        _check_range(start, stop, self._n)
        out = np.empty(stop - start, dtype=np.int64)
        for at in range(start, stop, _SUB_BLOCK):
            end = min(at + _SUB_BLOCK, stop)
            x = self._permute(np.arange(at, end, dtype=np.uint64))
            outside = np.flatnonzero(x >= self._n)
            while outside.size:
                x[outside] = self._permute(x[outside])
                outside = outside[x[outside] >= self._n]
            out[at - start : end - start] = x.astype(np.int64)
        return out

    def _permute(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Permute numbers below ``2**(high_bits + low_bits)`` by a Feistel network over the two halves."""
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        high, low = x >> low_bits, x & np.uint64((1 << self._low_bits) - 1)
        for at in range(0, _ROUNDS, 2):
            high ^= _scramble(low, self._keys[at], high_bits)
            low ^= _scramble(high, self._keys[at + 1], low_bits)
        return (high << low_bits) | low


def _scramble(x: npt.NDArray[np.uint64], key: np.uint64, bits: np.uint64) -> npt.NDArray[np.uint64]:
    """Return the top ``bits`` bits of a keyed hash of each number (multiply and shift-xor, twice)."""
    y = x + key  # unsigned arithmetic on arrays wraps around, as intended
    y *= np.uint64(0x9E3779B97F4A7C15)
    y ^= y >> np.uint64(29)
    y += key
    y *= np.uint64(0xD6E8FEB86659FD93)
    y ^= y >> np.uint64(32)
    y *= np.uint64(0xD6E8FEB86659FD93)
    y >>= np.uint64(64) - bits
    return y


def _checked_size(n: int) -> int:
    if not 0 <= n <= 1 << 40:
        raise ValueError(f"An order was asked for over {n} documents; the number must be from 0 to 2**40.")
    return n


def _check_range(start: int, stop: int, n: int) -> None:
    if not 0 <= start <= stop <= n:
        raise ValueError(
            f"Places {start} to {stop} were asked of an order of {n} documents; give 0 <= start <= stop <= {n}."
        )
