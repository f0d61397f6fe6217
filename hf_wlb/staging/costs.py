"""What the parts of a model cost that pipeline stages share out: every layer, the embedding, the LM head with its loss.

Counted costs are those of ``AnalyticWorkload.from_config``, told apart by layer, so together they are what that model
prices a micro-batch at. What is not a matrix product (norms, activations, the softmax of the loss) is left out on every
stage: by a count of the bytes that eager kernels move, they add about 0.4 of the products' time to a layer of Llama-3
8B as well as to its head and loss, and so hardly shift the cuts. Measured seconds are better, where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_wlb.staging.partition import StageLayout, balance_stages, check_costs
from hf_wlb.workload import AnalyticWorkload, HardwareFigures, ModelCount, count_model
from hf_wlb.workload.base import IntArray, causal_pairs, check_lengths, is_whole_number
from hf_wlb.workload.hardware import hardware_figures
from hf_wlb.workload.profiled import read_json

TYPICAL_DOCUMENTS = 4
"""Documents of equal length in the micro-batch that costs are counted for by default.

Attention per token is that of the document length that a token sees on average, E[d^2] / E[d]. Of the reference mix
(see ``hf_wlb.lengths.sample_lengths``) that is 0.14 of a context of 128K tokens, 0.22 of 32K and 0.54 of 8K, with
longer documents cut to the context; a quarter lies among them.
"""
MEMORY_BYTES_PER_SECOND = {"h100": 2.7e12, "h100-flash-attn-4": 2.7e12, "cpu": 1e10}
"""Memory traffic by hardware preset: four fifths of an H100 SXM's data sheet (an assumption, not a measurement), and an
order of magnitude for a CPU."""
_BYTES = 2  # of a number: bf16
SCHEMA = "hf_wlb.stage_costs/1"
_MEASURED_KEYS = ("layers", "before", "after")
_OTHER_KEYS = ("schema", "source", "analysis")  # of a file: for its reader, not for the costs


@dataclass(frozen=True)
class StageCosts:
    """Cost of a micro-batch, forward plus backward, part by part.

    Args:
        layers: of every decoder layer, in seconds (only ratios matter for a layout).
        before: of the embedding, on the first stage.
        after: of the final norm, the LM head and the loss, on the last stage.
        source: where the costs come from, in words.

    Raises:
        ValueError: if there is no layer, or a cost is negative or not finite.

    >>> costs = StageCosts((1.0,) * 6, before=0.0, after=2.0, source="by hand")
    >>> layout = costs.layout(2)
    >>> print(layout, costs.per_stage(layout))
    layers 0-3 | 4-5 (4.0, 4.0)
    """

    layers: tuple[float, ...]
    before: float
    after: float
    source: str

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("Stage costs need the cost of one layer at least, but layers is empty.")
        check_costs(self.layers, self.before, self.after)
        object.__setattr__(self, "layers", tuple(float(cost) for cost in self.layers))
        object.__setattr__(self, "before", float(self.before))
        object.__setattr__(self, "after", float(self.after))

    @classmethod
    def from_measurements(cls, data: Mapping[str, Any], source: str = "measured") -> StageCosts:
        """Costs from measured seconds.

        Args:
            data: ``{"layers": [seconds of every layer], "before": seconds, "after": seconds}``, forward plus backward
                of one micro-batch, as read from JSON.
            source: where they were measured; errors name it, too.

        Raises:
            ValueError: if a key is missing or unknown, ``layers`` is no list or empty, or a value is not a number of
                seconds: finite, above 0 for a layer, at least 0 for the others.

        >>> StageCosts.from_measurements({"layers": [0.5, 0.5], "before": 0.01, "after": 0.3}).after
        0.3
        """
        who = f"the stage costs ({source})"
        if not isinstance(data, Mapping):
            raise ValueError(f"T{who[1:]} must be an object with {', '.join(_MEASURED_KEYS)}, but {data!r} was given.")
        missing = [key for key in _MEASURED_KEYS if key not in data]
        unknown = sorted(str(key) for key in data if key not in _MEASURED_KEYS)
        if missing or unknown:
            raise ValueError(
                f"T{who[1:]} need exactly the keys {', '.join(_MEASURED_KEYS)}; missing are {missing}, unknown are "
                f"{unknown}."
            )
        layers = data["layers"]
        if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
            raise ValueError(f"layers of {who} must be a list of seconds, one a layer, but {layers!r} was given.")
        for index, seconds in enumerate(layers):
            if _is_number(seconds) and seconds <= 0:
                raise ValueError(f"Layer {index} of {who} must take above 0 seconds, but {seconds!r} was given.")
        for value in (*layers, data["before"], data["after"]):
            if not _is_number(value):
                raise ValueError(f"T{who[1:]} must hold numbers of seconds, but {value!r} was given.")
        return cls(tuple(layers), data["before"], data["after"], source)

    @classmethod
    def load(cls, path: str | Path) -> StageCosts:
        """Costs from a JSON file: the object that ``from_measurements`` takes, or what ``hf-wlb stages --json`` writes.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no JSON, of another schema, or as ``from_measurements`` says.
        """
        data = read_json(path, "stage costs")
        if not isinstance(data, Mapping):
            return cls.from_measurements(data, f"in {path}")
        if data.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"The stage costs in {path} must be of schema {SCHEMA!r}, not {data['schema']!r}.")
        costs = cls.from_measurements({key: data[key] for key in data if key not in _OTHER_KEYS}, f"in {path}")
        return replace(costs, source=str(data.get("source", costs.source)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable content, schema ``hf_wlb.stage_costs/1``; ``load`` reads it from a file."""
        costs = {"layers": list(self.layers), "before": self.before, "after": self.after}
        return {"schema": SCHEMA, "source": self.source, **costs}

    def layout(self, pp_size: int) -> StageLayout:
        """The layout of ``pp_size`` stages whose costliest stage costs least; see ``balance_stages``.

        Raises:
            ValueError: if ``pp_size`` is below 1 or above the number of layers.
        """
        return balance_stages(self.layers, pp_size, before=self.before, after=self.after)

    def per_stage(self, layout: StageLayout) -> tuple[float, ...]:
        """Cost of every stage of a layout, embedding and head included.

        Raises:
            ValueError: if the layout is of another number of layers.
        """
        if layout.layers != len(self.layers):
            raise ValueError(f"The layout is of {layout.layers} layers, but there are costs of {len(self.layers)}.")
        costs = [sum(self.layers[layer] for layer in layout.range_of(stage)) for stage in range(layout.pp_size)]
        costs[0] += self.before
        costs[-1] += self.after
        return tuple(costs)


def typical_lengths(context_length: int) -> list[int]:
    """Document lengths of a typical micro-batch: a few equal documents (see ``TYPICAL_DOCUMENTS``).

    Args:
        context_length: tokens of the micro-batch, at least 1.

    Raises:
        ValueError: if it is no whole number of at least 1.

    >>> typical_lengths(131_072), typical_lengths(10), typical_lengths(2)
    ([32768, 32768, 32768, 32768], [3, 3, 2, 2], [1, 1])
    """
    if not is_whole_number(context_length) or context_length < 1:
        raise ValueError(f"context_length must be a whole number of at least 1, got {context_length!r}.")
    size, more = divmod(int(context_length), TYPICAL_DOCUMENTS)
    lengths = [size + (place < more) for place in range(TYPICAL_DOCUMENTS)]
    return [length for length in lengths if length]


def stage_costs(
    config: Any,
    lengths: NDArray[Any] | Sequence[int] | None = None,
    *,
    context_length: int | None = None,
    hardware: HardwareFigures | str = "h100",
    memory_bytes_per_second: float | None = None,
    tp_size: int = 1,
    gradient_checkpointing: bool = False,
    gated_mlp: bool | None = None,
) -> StageCosts:
    """Count what the parts of a model cost for a micro-batch, from its Transformers config.

    Layers: by their own weights and widths, so sliding windows, dense layers and experts each have their cost; with
    ``gradient_checkpointing`` a second forward. Head and loss: the three matrix products of ``linear_cross_entropy``,
    which takes its gradients while a chunk's logits are there and computes none of them twice, with or without
    checkpointing. Embedding: the bytes it moves.

    Args:
        config: a Transformers config, or any object with its attributes; nested text configs are entered.
        lengths: document lengths of the micro-batch in tokens, integers of shape ``(documents,)``.
        context_length: in place of ``lengths``: tokens of a micro-batch of ``typical_lengths``.
        hardware: figures of one device, or a preset's name (see ``HARDWARE_PRESETS``).
        memory_bytes_per_second: what the embedding's bytes are moved at; known for the presets.
        tp_size: devices that share every layer's heads and matrices, and the vocabulary, evenly.
        gradient_checkpointing: whether every layer's forward runs a second time in the backward.
        gated_mlp: see ``count_model``; needed for families it does not know.

    Raises:
        TypeError: if the lengths are no integers.
        ValueError: if not exactly one of ``lengths`` and ``context_length`` is given, there is no token, figures of
            your own come without ``memory_bytes_per_second``, or as ``AnalyticWorkload.from_config`` says.

    Llama-3 8B: head and loss cost about as much as two layers.

    >>> from types import SimpleNamespace
    >>> llama_3_8b = SimpleNamespace(
    ...     model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256,
    ...     num_attention_heads=32, num_key_value_heads=8)
    >>> costs = stage_costs(llama_3_8b, context_length=8192)
    >>> print(round(costs.after / costs.layers[0], 1), costs.layout(4))
    2.2 layers 0-7 | 8-16 | 17-25 | 26-31
    """
    documents = documents_to_cost(lengths, context_length)
    figures = hardware_figures(hardware)
    bandwidth = _bandwidth(figures, memory_bytes_per_second)
    workload = AnalyticWorkload.from_config(
        config, figures, tp_size=tp_size, gradient_checkpointing=gradient_checkpointing, gated_mlp=gated_mlp
    )
    count = count_model(config, gated_mlp=gated_mlp)
    tokens = int(documents.sum())
    # Products of a weight: forward, for the gradient of its input and for its own; the layers' forward once more.
    layer_products = [layer.weights * (4 if gradient_checkpointing else 3) for layer in count.layers]
    head_products = count.head_weights * 3
    per_product = workload.linear(tokens) / (sum(layer_products) + head_products)
    attention = _attention(count, workload, documents)
    return StageCosts(
        tuple(products * per_product + own for products, own in zip(layer_products, attention, strict=True)),
        before=_embedding_bytes(config, count, tokens, tp_size) / bandwidth,
        after=head_products * per_product,
        source=f"counted from the config for {figures.name!r}, {said(documents)}",
    )


def documents_to_cost(lengths: NDArray[Any] | Sequence[int] | None, context_length: int | None = None) -> IntArray:
    """The documents of the micro-batch that costs are for, int64 of shape ``(documents,)``; see ``stage_costs``.

    Raises:
        TypeError: if the lengths are no integers.
        ValueError: if not exactly one of the two is given, or there is no token.
    """
    if (lengths is None) == (context_length is None):
        given = "neither" if lengths is None else "both"
        raise ValueError(f"Give either lengths or context_length to count stage costs for; {given} was given.")
    if context_length is not None:
        lengths = typical_lengths(context_length)
    documents = check_lengths(np.atleast_1d(np.asarray(lengths)))
    if documents.ndim != 1 or not documents.sum():
        raise ValueError(f"lengths must be the lengths of one document at least, in a list, but {lengths!r} was given.")
    return documents


def said(documents: IntArray) -> str:
    """Documents in words, the first four of them.

    >>> said(np.array([300, 20, 7, 7, 7]))
    'documents of 300, 20, 7, 7, ... tokens'
    """
    first = ", ".join(str(length) for length in documents[:4].tolist())
    return f"documents of {first}{', ...' if documents.size > 4 else ''} tokens"


def _bandwidth(figures: HardwareFigures, given: float | None) -> float:
    if given is None:
        if figures.name not in MEMORY_BYTES_PER_SECOND:
            raise ValueError(
                f"How fast {figures.name!r} moves memory is not known here (known are "
                f"{', '.join(MEMORY_BYTES_PER_SECOND)}); give memory_bytes_per_second."
            )
        return MEMORY_BYTES_PER_SECOND[figures.name]
    if not _is_number(given) or not np.isfinite(given) or given <= 0:
        raise ValueError(f"memory_bytes_per_second must be above 0 and finite, but {given!r} was given.")
    return float(given)


def _attention(count: ModelCount, workload: AnalyticWorkload, documents: IntArray) -> list[float]:
    """Seconds of every layer's attention: its part, by width, of what layers of its window cost together."""
    widths = [layer.qk_width + layer.v_width for layer in count.layers]
    rates = {window: seconds_per_pair for seconds_per_pair, window in workload.groups}
    seconds = []
    for layer, width in zip(count.layers, widths, strict=True):
        group = sum(other for twin, other in zip(count.layers, widths, strict=True) if twin.window == layer.window)
        pairs = float(np.sum(causal_pairs(documents, layer.window), dtype=float))
        seconds.append(rates[layer.window] * pairs * width / group)
    return seconds


def _embedding_bytes(config: Any, count: ModelCount, tokens: int, tp_size: int) -> float:
    """Bytes that the embedding moves, forward and backward; its look-up is not computed again by checkpointing."""
    text = config if getattr(config, "hidden_size", None) is not None else config.text_config
    rows = tokens * int(text.hidden_size)
    table = count.head_weights / tp_size
    # A token's row is read and written; its gradient read and added to a row. The table's gradient is cleared once,
    # and added to that of the micro-batches before.
    return _BYTES * (rows * (2 + 3) + table * (1 + 3))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
