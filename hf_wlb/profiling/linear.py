"""Measures everything in a model but attention, for profiles: layers, embedding, head and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from hf_wlb.attention import AttentionContext
from hf_wlb.parallel import ParallelMesh
from hf_wlb.profiling.attention import AttentionShape
from hf_wlb.profiling.no_kernel import CopyKernel
from hf_wlb.profiling.pieces import ModelPieces, Piece, micro_batch
from hf_wlb.profiling.timing import PairTimer, forward_backward_seconds

Samples = list[dict[str, int | float]]
SECTIONS = ("linear", "head", "embedding")
_FEW_TOKENS = 64


def _expected_seconds(found: dict[str, Samples], tokens: int, repeats: int) -> float:
    """Of measuring every part, by what it took for fewer tokens; making the model and compiling left out."""
    last = [samples[-1] for samples in found.values()]
    once = sum(sample["forward_seconds"] + sample["backward_seconds"] for sample in last)
    return (repeats + 1) * once * tokens / last[0]["tokens"]


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike.

    Attributes:
        place: The first of them.
        count: How many there are.
        shape: What they attend with, on one of the ranks that share every matrix.
        window: Tokens that a query sees, itself included; None for all.
    """

    place: int
    count: int
    shape: AttentionShape
    window: int | None


@dataclass(frozen=True)
class LinearBench:
    """A model whose parts are timed without attention.

    Attributes:
        config: Of the model.
        device: Where.
        dtype: To compute in, see ``ModelPieces``.
        mesh: This process's place: its ``tp_size`` ranks share every matrix, and must do everything here together.
        fused_loss: See ``choose_fused_loss``.
        timer: How to time; None for ``forward_backward_seconds``.
        compiled: Whether layers are compiled, as with ``torch_compile``.
    """

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    mesh: ParallelMesh = field(default_factory=ParallelMesh)
    fused_loss: str = "auto"
    timer: PairTimer | None = None
    compiled: bool = False

    def kinds(self) -> list[LayerKind]:
        """What layers the model has, by running one of each kind once.

        Raises:
            ValueError: If a layer does not attend, or they attend with different heads.
        """
        kernel = CopyKernel()
        pieces = replace(self._pieces(_FEW_TOKENS, kernel), compiled=False)
        places, found = pieces.kinds(), list[LayerKind]()
        for place in dict.fromkeys(places):
            kernel.seen.clear()
            pieces.layer(place).forward()
            if not kernel.seen:
                raise ValueError(
                    f"Layer {place} of this {self.config.model_type} model does not attend to documents, so a profile "
                    "cannot say what it costs."
                )
            heads, kv_heads, head_size, values, options = kernel.seen[-1]
            shape = AttentionShape(heads, kv_heads, head_size, values, self.dtype, options.softcap)
            found.append(LayerKind(place, places.count(place), shape, options.sliding_window))
        shapes = list(dict.fromkeys(kind.shape for kind in found))
        if len(shapes) > 1:
            raise ValueError(
                f"The layers of this {self.config.model_type} model attend with different heads ({shapes[0]} and "
                f"{shapes[1]}), which one profile cannot hold."
            )
        return found

    def time(
        self,
        kinds: Iterable[LayerKind],
        token_counts: Iterable[int],
        *,
        repeats: int = 5,
        enough: Callable[[float], bool] = lambda seconds: False,
        tell: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Samples]:
        """The sections ``linear``, ``head`` and ``embedding`` of a profile.

        Args:
            kinds: See ``kinds``; a sample of ``linear`` is of the mean layer.
            token_counts: Tokens of the micro-batches. A process on its own leaves out those that do not fit.
            repeats: Measurements of each part, after one that is not counted.
            enough: Asked before every micro-batch but the first, with the seconds that its measurements will take by
                those of the one before; must say the same on all ranks.
            tell: Called with a line about every part.

        Raises:
            ValueError: If not even the smallest micro-batch fits, or, with several processes, any does not.
        """
        found: dict[str, Samples] = {section: [] for section in SECTIONS}
        timer = self.timer or partial(forward_backward_seconds, device=self.device, repeats=repeats)
        kinds, kept = list(kinds), dict[Any, Any]()
        for tokens in sorted(set(token_counts)):
            if found["linear"] and enough(_expected_seconds(found, tokens, repeats)):
                break
            try:
                pieces = replace(self._pieces(tokens, CopyKernel()), kept=kept)
                times = self._time(kinds, pieces, tokens, timer, tell)
            except torch.OutOfMemoryError as error:
                if found["linear"] and self.mesh.sizes.total == 1:
                    tell(f"{tokens:,} tokens do not fit: {found['linear'][-1]['tokens']:,} are the most measured")
                    break
                raise ValueError(
                    f"A micro-batch of {tokens:,} tokens does not fit one layer of the model on {self.device}. "
                    "Measure up to fewer tokens."
                ) from error
            for section, (forward, backward) in times.items():
                sample = {"tokens": tokens, "forward_seconds": forward, "backward_seconds": backward}
                found[section].append(sample)
        return found

    def _time(
        self, kinds: list[LayerKind], pieces: ModelPieces, tokens: int, timer: PairTimer, tell: Callable[[str], None]
    ) -> dict[str, tuple[float, float]]:
        def timed(what: str, piece: Piece) -> tuple[float, float]:
            forward, backward = timer(piece.forward, piece.backward)
            tell(f"{what}, {tokens:,} tokens: {forward * 1e3:.3f} + {backward * 1e3:.3f} ms")
            return forward, backward

        layers = sum(kind.count for kind in kinds)
        of_kind = [
            (kind.count, timed(f"layer {kind.place} ({kind.count} alike)", pieces.layer(kind.place))) for kind in kinds
        ]
        forward, backward = (sum(count * times[part] for count, times in of_kind) / layers for part in (0, 1))
        return {
            "linear": (forward, backward),
            "head": timed("final norm, head and loss", pieces.after(self.fused_loss)),
            "embedding": timed("embedding", pieces.before()),
        }

    def _pieces(self, tokens: int, kernel: CopyKernel) -> ModelPieces:
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None) or tokens
        whole, rest = divmod(tokens, limit)
        documents = np.array([limit] * whole + [rest] * (rest > 0), dtype=np.int64)
        inputs = micro_batch(self.config, documents, self.device, AttentionContext(kernel=kernel))
        return ModelPieces(self.config, self.device, self.dtype, inputs, self.mesh, self.compiled)
