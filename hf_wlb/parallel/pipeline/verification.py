"""Whether the stages of a replica are about to run the same micro-batches.

A stage knows what it receives from its own micro-batches. Where its neighbour has others, they would wait for each
other for ever, or train on what was left in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hf_wlb.parallel.agreement import by_rank
from hf_wlb.parallel.collectives import all_gather, gather_objects, group_device, process_count
from hf_wlb.parallel.mesh import ParallelMesh


def verify_micro_batches(tokens: Sequence[int], step: int, mesh: ParallelMesh) -> None:
    """Compares a step over the ranks that share it, of all replicas; all ranks must call this together.

    Costs one all-gather of 16 bytes a rank, on the CPU where the process group can.

    Args:
        tokens: Of every micro-batch, as this rank has it.
        step: From 1, for the error.
        mesh: This process's place. Ranks with the same replica and context-parallel rank must agree.

    Raises:
        RuntimeError: On every rank alike, naming the ranks, their stages and what differs.

    >>> verify_micro_batches([16, 14], 1, ParallelMesh())  # one process always agrees with itself
    """
    if process_count() == 1:
        return
    shared_by = mesh.dp_rank * mesh.cp_size + mesh.cp_rank
    digest = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest()
    numbers = [shared_by, int.from_bytes(digest, "little") >> 1]
    own = torch.tensor(numbers, dtype=torch.int64, device=group_device(None))
    gathered = own.new_empty(process_count() * 2)
    all_gather(gathered, own)
    rows = gathered.view(-1, 2).tolist()
    if len({(shared, found) for shared, found in rows}) == len({shared for shared, _ in rows}):
        return
    told: list[tuple[str, int, int, list[int]]] = gather_objects((mesh.place, mesh.dp_rank, shared_by, [*tokens]))
    places = [place for place, *_ in told]
    problems = []
    for replica, shared in dict.fromkeys((replica, shared) for _, replica, shared, _ in told):
        steps = {rank: found for rank, (_, _, of, found) in enumerate(told) if of == shared}
        if any(found != steps[min(steps)] for found in steps.values()):
            problems.append(f"in replica {replica}, {by_rank(_what_differs(steps), places)}")
    raise RuntimeError(
        f"The ranks do not agree on the micro-batches of step {step}: {'; '.join(problems)}. Every stage collates them "
        "for itself: give all ranks the same documents, and a data_collator that makes the same of "
        "the same documents on every rank."
    )


def _what_differs(steps: dict[int, list[int]]) -> dict[int, str]:
    """By rank, how many micro-batches there are; else what the first one is that is not the same everywhere."""
    if len({len(found) for found in steps.values()}) > 1:
        return {rank: f"{len(found)} micro-batches" for rank, found in steps.items()}
    first, _ = next((place, row) for place, row in enumerate(zip(*steps.values(), strict=True)) if len(set(row)) > 1)
    return {rank: f"{found[first]} tokens in micro-batch {first}" for rank, found in steps.items()}
