"""The parts of the context-parallel benchmark, in the order in which they run."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import context_parallel_report as show
import torch
import torch.distributed as dist
from context_parallel_cases import (
    ADAPTIVE,
    COMPARED,
    PER_DOCUMENT,
    PER_SEQUENCE,
    Case,
    Draws,
    K,
    configs,
    distinct,
    plans,
)
from context_parallel_measure import Bench, Place, errors, peak_memory

from hf_wlb.attention.context import AttentionContext
from hf_wlb.attention.kernels import choose_kernel
from hf_wlb.parallel import ProcessGroupExchange
from hf_wlb.parallel.collective_times import time_collectives
from hf_wlb.profiling import (
    AttentionShape,
    assemble_profile,
    attention_points,
    device_name,
    library_versions,
    median_seconds,
    time_attention,
    time_exchange,
)
from hf_wlb.sharding import Sharder, ShardPlan
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload, WorkloadModel

LONGEST = 128 * K
WARMUPS = 2
CHOICE_SAMPLES, CHOICE_WARMUPS = 3, 1
EXCHANGED = (1 * K, 4 * K, 16 * K, 64 * K, 128 * K)
MOST_GROUPS = 8
UNPROFILED = AnalyticWorkload.from_crossover(8 * K)
"""What plans are made with where nothing was profiled."""


def join(device: str) -> Place:
    """Joins the processes that torchrun started.

    Raises:
        ValueError: If it did not start this one, there is one process only, or no GPU.
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "Several processes are needed: torchrun --nproc_per_node 4 recipes/benchmarks/context_parallel.py ..."
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ValueError("Context parallelism needs 2 processes at least: torchrun --nproc_per_node 4 ...")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device. --device cpu tries the program out, with --shrink and few heads.")
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        if device == "cuda":
            dist.init_process_group("nccl", device_id=place)
        else:
            dist.init_process_group("gloo")
    return Place(dist.get_rank(), dist.get_world_size(), place)


class Parts:
    """What is measured, on the ranks that torchrun started.

    Args:
        options: The command line.
        draws: Where micro-batches come from.
        log: Told of progress.

    Raises:
        ValueError: For what the user can mend.
    """

    def __init__(self, options: argparse.Namespace, draws: Draws, log: Callable[[str], None]) -> None:
        self.options, self.draws, self.log = options, draws, log
        self.cases = draws.cases(options.quick)
        self.random_cases = draws.random_cases(options.choices, options.seed)
        self.place = join(options.device)
        self.kernel = choose_kernel(self._shape(options.kv_heads[0]).request(self.place.device), options.kernel)
        for kv_heads in options.kv_heads:
            choose_kernel(self._shape(kv_heads).request(self.place.device), self.kernel.name)
        self.exchange = ProcessGroupExchange()
        self.strategies = configs(self.place.size, draws.shrink)

    def _shape(self, kv_heads: int) -> AttentionShape:
        options = self.options
        return AttentionShape(options.heads, kv_heads, options.head_size, dtype=getattr(torch, options.dtype))

    def context(self) -> AttentionContext:
        """The context that was asked for."""
        return self.context_of(self.options.kv_head_groups, not self.options.keep_gathered)

    def context_of(self, groups: int | None, regather: bool) -> AttentionContext:
        """A context with so many groups of KV heads."""
        return AttentionContext(
            kernel=self.kernel,
            exchange=self.exchange,
            kv_head_groups=groups,
            regather=regather,
        )

    def machine(self) -> dict[str, Any]:
        """For the environment section."""
        return {"device": device_name(self.place.device), "devices": self.place.size, "versions": library_versions()}

    def settings(self) -> dict[str, Any]:
        """For the settings section."""
        options = self.options
        return {
            "lengths": options.lengths.stem,
            "cp_size": self.place.size,
            "kernel": self.kernel.name,
            "heads": options.heads,
            "head_size": options.head_size,
            "dtype": options.dtype,
            "kv_head_groups": options.kv_head_groups,
            "regather": not options.keep_gathered,
            "samples": options.samples,
            "warmups": WARMUPS,
            "ahead_ms": options.ahead_ms,
            "choice_samples": CHOICE_SAMPLES,
            "shrink": options.shrink,
            "quick": options.quick,
            "parts": options.parts,
        }

    def close(self) -> None:
        """Leaves the other processes."""
        dist.barrier()
        dist.destroy_process_group()

    def of(self, kv_heads: int, results: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and functions of the chosen parts for a number of KV heads; each puts its findings into ``results``."""
        shape, chosen = self._shape(kv_heads), self.options.parts
        if "errors" in chosen:
            yield "error against float64", lambda: results.update(errors=self._errors(shape))
        if "profile" in chosen:
            yield "profile", lambda: results.update(profile=self._profile(shape))
        if not {"cases", "choice", "contexts"} & set(chosen):
            return
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
        profile = results.get("profile")
        part = _Comparison(self, shape, UNPROFILED if profile is None else ProfiledWorkload.from_dict(profile))
        if "cases" in chosen:
            yield "cases", lambda: part.run_cases(results.setdefault("cases", []))
        if "choice" in chosen:
            yield "random micro-batches", lambda: results.update(choice=part.choice())
        if "contexts" in chosen:
            yield "groups of KV heads, memory", lambda: results.update(contexts=part.contexts(kv_heads))

    def _errors(self, shape: AttentionShape) -> dict[str, Any]:
        lengths = self.draws.check_lengths()
        compared = {name: self.strategies[name] for name in (ADAPTIVE, PER_SEQUENCE, PER_DOCUMENT)}
        workload = AnalyticWorkload.from_crossover(K)  # nothing is profiled yet; any plan will do
        found = plans(lengths, workload, compared)
        return errors(self.place, shape, self.kernel, self.context(), lengths, found)

    def _profile(self, shape: AttentionShape) -> dict[str, Any]:
        """Attention, each rank a part of the points, and the exchange."""
        place, longest = self.place, self.draws.size(LONGEST)
        own = attention_points(longest)[place.rank :: place.size]
        measured = time_attention(
            self.kernel,
            shape,
            own,
            place.device,
            queries_per_call=self.draws.size(64 * K),
            keys_per_call=self.draws.size(256 * K),
        )
        attention = [sample for samples in place.gather(measured) for sample in samples]
        self.log("profile: exchange")
        tokens = [self.draws.size(count) for count in EXCHANGED]
        exchange = time_exchange(self.context(), shape, tokens, place.device)
        sizes = [count * shape.kv_width * shape.dtype.itemsize for count in tokens]
        timer = partial(median_seconds, device=place.device)
        collectives = time_collectives(sizes, timer, place.device, dtype=shape.dtype)
        return assemble_profile(shape, self.kernel.name, place.device, attention, collectives=[*collectives, *exchange])


class _Comparison:
    """The parts that compare plans, for one number of KV heads."""

    def __init__(self, parts: Parts, shape: AttentionShape, workload: WorkloadModel) -> None:
        self.parts, self.shape, self.workload = parts, shape, workload
        longest = max(sum(case.lengths) for case in [*parts.cases, *parts.random_cases])
        self.bench = Bench(parts.place, shape, parts.kernel, longest, parts.options.ahead_ms)

    def run_cases(self, rows: list[dict[str, Any]]) -> None:
        """Every strategy and the ideal on every case."""
        for case in self.parts.cases:
            found = plans(case.lengths, self.workload, self.parts.strategies)
            first = distinct(found)
            context = self.parts.context()
            runs = {label: self.bench.sharded(found[label], context) for label in dict.fromkeys(first.values())}
            times = self.bench.race(
                {show.IDEAL: self.bench.plain(case.lengths), **runs}, self.parts.options.samples, WARMUPS
            )
            rows.append(show.case_row(case, found, first, times, self._plan_ms(case)))
            adaptive = rows[-1]["strategies"][ADAPTIVE]
            self.parts.log(
                f"{case.name}: ideal {rows[-1]['ideal_ms']:.2f} ms, adaptive {adaptive['ms']:.2f} ms "
                f"({adaptive['share']:.1%}), best fixed {rows[-1]['best_fixed']}, regret {rows[-1]['regret']:.1%}"
            )

    def _plan_ms(self, case: Case) -> float:
        sharder = Sharder(self.parts.strategies[ADAPTIVE], self.workload)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            sharder.plan(case.lengths)
            times.append(time.perf_counter() - start)
        return sorted(times)[2] * 1000

    def choice(self) -> dict[str, Any]:
        """Predicted and measured order of strategies on random micro-batches."""
        strategies = {label: self.parts.strategies[label] for label in COMPARED}
        context = self.parts.context()
        rows = []
        for case in self.parts.random_cases:
            found = plans(case.lengths, self.workload, strategies)
            first = distinct(found)
            runs = {label: self.bench.sharded(found[label], context) for label in dict.fromkeys(first.values())}
            times = self.bench.race(runs, CHOICE_SAMPLES, CHOICE_WARMUPS)
            rows.append(show.choice_row(case, found, first, times))
        return show.choice_summary(rows)

    def contexts(self, kv_heads: int) -> dict[str, Any]:
        """Groups of KV heads and keeping gathered keys: time on a short and a long case, memory on the long one."""
        made = {
            show.context_label(groups, regather): self.parts.context_of(groups, regather)
            for regather in (True, False)
            for groups in self._groups(kv_heads)
        }
        short = next(case for case in self.parts.cases if case.context == LONGEST and case.kind == "short")
        long = next(case for case in self.parts.cases if case.context == LONGEST and " + short" in case.name)
        milliseconds = {}
        for case in (short, long):
            plan = self._adaptive(case)
            runs = {label: self.bench.sharded(plan, context) for label, context in made.items()}
            milliseconds[case.name] = show.medians_ms(self.bench.race(runs, self.parts.options.samples, WARMUPS))
        memory = None
        if self.parts.place.device.type == "cuda":
            memory = peak_memory(self.parts.place, self.shape, self._adaptive(long), made)
        return {"ms": milliseconds, "memory": memory}

    def _groups(self, kv_heads: int) -> list[int | None]:
        divisors = {n for n in range(1, MOST_GROUPS + 1) if kv_heads % n == 0}
        given = self.parts.options.kv_head_groups
        return [None, *sorted(divisors if given is None else divisors | {given})]

    def _adaptive(self, case: Case) -> ShardPlan:
        return Sharder(self.parts.strategies[ADAPTIVE], self.workload).plan(case.lengths)
