"""Checking that all ranks mean the same, before they act on it.

Planning is replicated, not communicated: every rank computes the same plan for itself. One integer per step is
compared, so that ranks whose data, settings or library versions differ stop at once with an error on all of
them, instead of training different documents or hanging in a collective later.
"""

import torch
import torch.distributed as dist


def process_count() -> int:
    """Return the number of processes that run together: 1 where ``torch.distributed`` is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def verify_agreement(value: int, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Compare ``value`` over all ranks; every rank of the group must call this the same number of times.

    Does nothing in a single process. Costs one all-gather of 8 bytes a rank.

    Args:
        value: Any integer that fits 64 bits, signed; ``StepPlan.digest()`` for plans.
        what: What is compared, as a noun phrase for the error, such as ``"the plan of step 3"``.
        group: The ranks to compare; all of them by default.

    Raises:
        RuntimeError: On every rank alike, if the values differ; it names each value and the ranks that hold it.
        ValueError: If ``value`` does not fit 64 bits.

    >>> verify_agreement(7, "a number")  # one process always agrees with itself
    """
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"verify_agreement compares integers of 64 bits; {value} for {what} does not fit.")
    if process_count() == 1:
        return
    own = torch.tensor([value], dtype=torch.int64, device=group_device(group))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    values = [int(tensor.item()) for tensor in gathered]
    if len(set(values)) == 1:
        return
    holders: dict[int, list[int]] = {}
    for rank, given in enumerate(values):
        holders.setdefault(given, []).append(rank)
    parts = [f"{_ranks(ranks)} {given}" for given, ranks in holders.items()]
    raise RuntimeError(
        f"The ranks do not agree on {what}: {'; '.join(parts)}. Every rank plans for itself and must be given the "
        "same documents in the same order, the same settings, seed, epoch and resume state, and the same version "
        "of hf_wlb."
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend can gather: the CPU where it can (nothing to wait for), else this rank's GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise RuntimeError(
            f"The process group's backend ({dist.get_backend_config(group)}) gathers on an accelerator, but this "
            "process has none."
        )
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
