"""A whole profile of a model on the devices at hand, within a number of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_wlb.attention import AttentionContext
from hf_wlb.attention.kernels import AttentionKernel, choose_kernel
from hf_wlb.parallel import ParallelMesh, ParallelSizes, ProcessGroupExchange, gather_figures, process_count
from hf_wlb.parallel.collective_times import BARE, time_collectives
from hf_wlb.parallel.collectives import gather_objects
from hf_wlb.parallel.launch import neighbour_groups, process_rank
from hf_wlb.profiling.assemble import assemble_profile
from hf_wlb.profiling.attention import AttentionShape, Point, time_attention
from hf_wlb.profiling.exchange import time_exchange
from hf_wlb.profiling.grid import AttentionBudget
from hf_wlb.profiling.held_out import held_out_errors
from hf_wlb.profiling.linear import LayerKind, LinearBench
from hf_wlb.profiling.timing import PairTimer, median_seconds

_ATTENTION, _HELD_OUT, _LINEAR = 0.5, 0.2, 0.2  # of the time; collectives need little of the rest
_PROBE = 4_160
_TOKENS = (1_024, 4_096, 16_384, 65_536)
_QUICK_TOKENS = (128, 512)
_BYTES = tuple(4**power for power in range(7, 15))  # 16 KiB to 256 MiB
_QUICK_BYTES = (4_096, 65_536)


def layer_tokens(longest: int) -> tuple[int, ...]:
    """Tokens of the micro-batches that layers are to be measured with, if documents have up to ``longest``.

    >>> layer_tokens(32_768)
    (1024, 4096, 16384)
    """
    return tuple(n for n in _TOKENS if n <= max(longest, _TOKENS[0]))


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure.

    Attributes:
        seconds: For everything, about; the shapes that are measured go by it.
        longest: Tokens of the longest document.
        tp_size: Ranks that share every matrix; as many processes must run, or a multiple.
        dtype: Of attention, and to compute all else in, see ``ModelPieces``.
        kernel: Name of the attention kernel; None for the one that the trainer would choose.
        fused_loss: See ``choose_fused_loss``.
        quick: To try it out: few shapes, measured twice; says little about the device.
        held_out: Random shapes of attention to compare with.
        seed: Of these.
        gradient_checkpointing: How the profile is to be read: whether layers' forwards run twice.
        compiled: Whether layers are compiled, as in training with ``torch_compile``.

    Raises:
        ValueError: For seconds that are not above 0, fewer than 64 tokens, or fewer than 4 shapes held out.
    """

    seconds: float = 150.0
    longest: int = 131_072
    tp_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    kernel: str | None = None
    fused_loss: str = "auto"
    quick: bool = False
    held_out: int = 40
    seed: int = 0
    gradient_checkpointing: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds!r}.")
        if self.longest < 64:
            raise ValueError(f"longest must be at least 64 tokens, got {self.longest!r}.")
        if self.held_out < 4:
            raise ValueError(f"held_out must be at least 4 shapes, got {self.held_out!r}.")

    @property
    def repeats(self) -> int:
        """Measurements of everything."""
        return 2 if self.quick else 5


def measure_profile(
    config: PreTrainedConfig,
    device: torch.device,
    options: ProfileOptions | None = None,
    *,
    timer: PairTimer | None = None,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure attention, linear work and, with several processes, collectives; all processes must call this together.

    Processes share the shapes of attention out; ``tp_size`` neighbours share a model. Weights are random, and no more
    than one part of the model is in memory at a time.

    Args:
        config: A Transformers config.
        device: This process's.
        options: What to measure; None for all as it comes.
        timer: How to time attention and linear work, instead of ``forward_backward_seconds``.
        clock: What the budget goes by.
        tell: Called with a line about everything that is measured.

    Returns:
        The profile's JSON object, the same on every rank, see ``hf_wlb.workload.profile_schema``. Its ``metadata`` has
        ``held_out``: see ``held_out_errors``.

    Raises:
        ValueError: If ``tp_size`` does not divide the processes, no kernel can do what is asked, the model cannot be
            cut or split, or one profile cannot hold it.
    """
    options = options or ProfileOptions()
    return _Profiler(config, device, options, timer, clock, tell).run()


@dataclass
class _Profiler:
    config: PreTrainedConfig
    device: torch.device
    options: ProfileOptions
    timer: PairTimer | None
    clock: Callable[[], float]
    tell: Callable[[str], None]
    mesh: ParallelMesh = field(init=False)

    def __post_init__(self) -> None:
        sizes = ParallelSizes.of(process_count(), tp_size=self.options.tp_size)
        self.mesh = ParallelMesh.of(sizes, self.device.type)

    def run(self) -> dict[str, Any]:
        begun, options = self.clock(), self.options
        bench = LinearBench(
            self.config,
            self.device,
            options.dtype,
            self.mesh,
            fused_loss=options.fused_loss,
            timer=self.timer,
            compiled=options.compiled,
        )
        kinds = bench.kinds()
        shape, kernel = kinds[0].shape, self._kernel(kinds)
        attention, others = self._attention(kernel, shape)
        sections = self._linear(bench, kinds)
        middle = sections["linear"][1::2] if len(sections["linear"]) > 2 else []  # between two of the grid each
        middle = [sample for sample in middle if sample is not sections["linear"][-1]]
        sections["linear"] = [sample for sample in sections["linear"] if sample not in middle]
        layers: dict[int | None, int] = {}
        for kind in kinds:
            layers[kind.window] = layers.get(kind.window, 0) + kind.count
        profile = assemble_profile(
            shape,
            kernel.name,
            self.device,
            attention,
            **sections,
            collectives=self._collectives(shape),
            layers=[{"count": count, "window": window} for window, count in layers.items()],
            model=self._model(),
            metadata={
                "processes": process_count(),
                "quick": options.quick,
                "seed": options.seed,
                "compiled": options.compiled,
            },
        )
        profile["gradient_checkpointing"] = options.gradient_checkpointing
        profile["metadata"]["held_out"] = held_out_errors(profile, others, middle)
        profile["metadata"]["seconds"] = self._latest(self.clock() - begun)
        return profile

    def _kernel(self, kinds: list[LayerKind]) -> AttentionKernel:
        """The one of the layers; where they would have several, that of layers with full attention."""
        kind = next((kind for kind in kinds if kind.window is None), kinds[0])
        return choose_kernel(kind.shape.request(self.device, window=kind.window is not None), self.options.kernel)

    def _model(self) -> dict[str, Any]:
        text = self.config.get_text_config()
        names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        return {"tp_size": self.options.tp_size, **{name: getattr(text, name) for name in names}}

    def _attention(
        self, kernel: AttentionKernel, shape: AttentionShape
    ) -> tuple[list[dict[str, int | float]], list[dict[str, int | float]]]:
        """Samples of the grid, and of random shapes."""
        options = self.options
        longest = min(options.longest, 512) if options.quick else options.longest
        queries = min(65_536, longest)

        def timed(points: list[Point]) -> list[dict[str, int | float]]:
            return time_attention(
                kernel,
                shape,
                points,
                self.device,
                queries_per_call=queries,
                keys_per_call=4 * queries,
                repeats=options.repeats,
                timer=self.timer,
                tell=self.tell,
            )

        def shared(points: list[Point]) -> list[dict[str, int | float]]:
            measured = timed(points[process_rank() :: process_count()])
            return [sample for samples in gather_objects(measured) for sample in samples]

        probe = min(_PROBE, longest)
        self.tell(f"attention with {kernel.name}: how fast it is")
        found = timed([(probe, probe)])[0]
        seconds = self._latest(found["forward_seconds"] + found["backward_seconds"])
        budget = AttentionBudget(
            # Where several processes share the shapes out, there is time for more of them.
            seconds=_ATTENTION * options.seconds * process_count(),
            seconds_per_pair=seconds / (probe * (probe + 1) / 2),
            queries_per_call=queries,
            keys_per_call=4 * queries,
            repeats=options.repeats,
            overhead=0.012 if self.device.type == "cuda" else 1e-4,
        )
        points = budget.points(longest)
        reached = max(keys for _, keys in points)
        if reached < longest:
            self.tell(f"{options.seconds:g} seconds are enough for documents of up to {reached:,} tokens")
        count = 8 if options.quick else options.held_out
        less = replace(budget, seconds=budget.seconds * _HELD_OUT / _ATTENTION)
        return shared(points), shared(less.random_points(reached, count, options.seed))

    def _linear(self, bench: LinearBench, kinds: list[LayerKind]) -> dict[str, list[dict[str, int | float]]]:
        """Samples of the grid, and between each two of its token counts one that is held out."""
        grid = _QUICK_TOKENS if self.options.quick else layer_tokens(self.options.longest)
        between = [round((first * last) ** 0.5) for first, last in pairwise(grid)]

        def enough(expected: float) -> bool:
            # Not by the clock: making the model and compiling it take longer than measuring, and without samples of
            # as many tokens as micro-batches have a profile says nothing about them.
            return self._latest(expected) > _LINEAR * self.options.seconds

        found = bench.time(kinds, [*grid, *between], repeats=self.options.repeats, enough=enough, tell=self.tell)
        first: dict[str, list[dict[str, int | float]]] = gather_objects(found)[0]  # all have measured the same
        return first

    def _collectives(self, shape: AttentionShape) -> list[dict[str, str | int | float]]:
        """Of neighbouring ranks, by twos, fours and so on."""
        options, samples = self.options, list[dict[str, str | int | float]]()
        timer = partial(median_seconds, device=self.device, repeats=options.repeats)
        tokens = [512] if options.quick else [n for n in (2_048, 8_192, 32_768, 131_072) if n <= options.longest]
        for size, group in neighbour_groups().items():
            self.tell(f"collectives of {size} ranks")
            operations = [name for name in BARE if name != "send_recv" or group is None]
            sizes = _QUICK_BYTES if options.quick else _BYTES
            samples += time_collectives(sizes, timer, self.device, group, options.dtype, operations)
            context = AttentionContext(exchange=ProcessGroupExchange(group))
            samples += time_exchange(context, shape, tokens, self.device, options.repeats)
        if samples:  # the slowest group's
            every = gather_figures([float(sample["seconds"]) for sample in samples])
            slowest = [max(times) for times in zip(*every, strict=True)]
            samples = [{**sample, "seconds": found} for sample, found in zip(samples, slowest, strict=True)]
        return samples

    def _latest(self, seconds: float) -> float:
        """The most of all ranks, which then decide alike."""
        return max(found for (found,) in gather_figures([seconds]))
