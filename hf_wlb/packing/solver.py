"""The exact baseline: fixed-length packing as a mixed-integer linear program, solved by HiGHS through SciPy."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from hf_wlb.packing.config import PackingConfig
from hf_wlb.packing.types import Document
from hf_wlb.packing.windowed import WindowedPacker, pack_greedily


class SolverPacker(WindowedPacker):
    """Fixed-length packing by MILP (paper, section 3.2 and Table 2).

    Minimises the sum over the window's steps of the heaviest micro-batch, subject to one micro-batch per document and
    the context length. Greedy decides which documents the window holds and gives an upper bound; where HiGHS finds
    nothing better within ``solver_seconds`` greedy's plan stands, and ``timeouts`` counts it. What a run into the time
    limit finds depends on the machine's speed: this baseline is for comparisons, not for training on several ranks.
    """

    name = "solver"

    def __init__(self, config: PackingConfig) -> None:
        super().__init__(config)
        self.windows = 0
        self.timeouts = 0

    def pack_window(self, documents: list[Document]) -> tuple[list[list[Document]], list[Document]]:
        """See ``WindowedPacker.pack_window``."""
        greedy, left_over = pack_greedily(documents, self.config)
        self.windows += 1
        kept = [document for micro_batch in greedy for document in micro_batch]
        solved = solve_packing(kept, self.config, _objective(greedy, self.config.micro_batches))
        if solved is None:
            self.timeouts += 1
            return greedy, left_over
        return solved, left_over


def _objective(micro_batches: list[list[Document]], per_step: int) -> float:
    loads = sorted((sum(d.workload for d in m) for m in micro_batches), reverse=True)
    return sum(loads[::per_step])


def solve_packing(documents: list[Document], config: PackingConfig, upper_bound: float) -> list[list[Document]] | None:
    """The best packing HiGHS finds within the time limit that is at least as good as ``upper_bound``, or None.

    Variables: x[document, micro-batch] in {0, 1}, z[step] >= workload of every micro-batch of that step. Micro-batches
    are interchangeable, so the k-th heaviest document is confined to the first k of them.
    """
    n, bins, steps = len(documents), config.micro_batches * config.window_steps, config.window_steps
    lengths = np.array([d.length for d in documents], dtype=float)
    loads = np.array([d.workload for d in documents])
    scale = loads.sum() / bins
    loads = loads / scale
    document, place = (axis.ravel() for axis in np.meshgrid(np.arange(n), np.arange(bins), indexing="ij"))
    column = document * bins + place
    columns = n * bins + steps
    once = coo_array((np.ones(n * bins), (document, column)), shape=(n, columns))
    room = coo_array((lengths[document], (place, column)), shape=(bins, columns))
    step_column = n * bins + np.arange(bins) // config.micro_batches
    heaviest = coo_array(
        (np.r_[loads[document], -np.ones(bins)], (np.r_[place, np.arange(bins)], np.r_[column, step_column])),
        shape=(bins, columns),
    )
    ordered = coo_array(  # z[0] >= z[1] >= ...: steps are interchangeable too
        (
            np.r_[np.ones(steps - 1), -np.ones(steps - 1)],
            (np.r_[0 : steps - 1, 0 : steps - 1], n * bins + np.r_[0 : steps - 1, 1:steps]),
        ),
        shape=(max(steps - 1, 0), columns),
    )
    upper = np.ones(columns)
    upper[n * bins :] = upper_bound / scale
    if steps == 1:
        rank = np.empty(n, dtype=int)
        rank[np.argsort(-loads, kind="stable")] = np.arange(n)
        upper[: n * bins][place > rank[document]] = 0
    result = milp(
        np.r_[np.zeros(n * bins), np.ones(steps)],
        integrality=np.r_[np.ones(n * bins), np.zeros(steps)],
        bounds=Bounds(np.zeros(columns), upper),
        constraints=[
            LinearConstraint(csr_array(once), 1, 1),
            LinearConstraint(csr_array(room), -np.inf, config.context_length),
            LinearConstraint(csr_array(heaviest), -np.inf, 0),
            *([LinearConstraint(csr_array(ordered), 0, np.inf)] if steps > 1 else []),
        ],
        options={"time_limit": config.solver_seconds, "mip_rel_gap": 0.005},
    )
    if result.x is None or result.fun * scale > upper_bound:
        return None
    chosen = np.asarray(result.x[: n * bins]).reshape(n, bins).argmax(1)
    packed: list[list[Document]] = [[] for _ in range(bins)]
    for item, where in zip(documents, chosen, strict=True):
        packed[where].append(item)
    # HiGHS keeps to its constraints within tolerances only.
    fits = all(sum(d.length for d in micro_batch) <= config.context_length for micro_batch in packed)
    return packed if fits and _objective(packed, config.micro_batches) <= upper_bound * (1 + 1e-9) else None
