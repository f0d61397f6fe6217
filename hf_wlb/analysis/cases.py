"""Which packers are compared, with which settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hf_wlb.lengths import IntArray
from hf_wlb.packing import PackingConfig

#: Most 0-1 variables (documents x micro-batches of a window) for which the solver is tried.
SOLVER_VARIABLES = 20_000


@dataclass(frozen=True)
class PackerCase:
    """A packer with its settings.

    Attributes:
        label: What tables call it.
        config: Its settings.
        steps: Steps' worth of documents it gets if not as many as the others (the solver is slow); None for all.
    """

    label: str
    config: PackingConfig
    steps: int | None = None


def standard_cases(config: PackingConfig, documents: IntArray, solver_windows: int = 3) -> list[PackerCase]:
    """Every packer with its usual settings; those of ``config`` for the packer that it names.

    Args:
        config: Layout and policies.
        documents: What they will get, for the size of the solver's problem.
        solver_windows: Steps' worth of documents for the solver; 0 leaves it out.
    """
    config = comparable(config)
    plain = replace(config, max_tokens_per_micro_batch=None)
    s_max = config.max_tokens_per_micro_batch or int(1.5 * config.context_length)
    cases = [
        PackerCase("concat-and-cut", replace(plain, packer="concat-and-cut")),
        PackerCase("next-fit", replace(plain, packer="next-fit")),
        *(PackerCase(f"greedy, window {k}", replace(plain, packer="greedy", window_steps=k)) for k in (1, 8)),
    ]
    if solver_windows and _solvable(config, documents):
        solver = replace(plain, packer="solver", window_steps=1, solver_seconds=min(config.solver_seconds, 2.0))
        cases.append(PackerCase("solver, window 1", solver, steps=solver_windows))
    wlb = replace(config, packer="wlb", max_tokens_per_micro_batch=s_max)
    return [*cases, PackerCase("wlb", wlb), PackerCase("steady", replace(config, packer="steady"))]


def comparable(config: PackingConfig) -> PackingConfig:
    """The same settings with documents kept whole up to the context length at most.

    The fixed-length packers must cut longer ones there. If the others kept them whole up to S_max they would do more
    attention for the same tokens and look slower than they are.
    """
    longest = min(config.max_document_tokens or config.context_length, config.context_length)
    return replace(config, max_document_tokens=longest)


def _solvable(config: PackingConfig, documents: IntArray) -> bool:
    per_step = config.tokens_per_step / max(float(np.mean(documents)), 1.0)
    return per_step * config.micro_batches <= SOLVER_VARIABLES
