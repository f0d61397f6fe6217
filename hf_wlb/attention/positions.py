"""How long a document may be that a model trains packed with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PositionLimit:
    """The longest document in tokens that is trained as it would be alone.

    Attributes:
        tokens: That many.
        reason: What sets it, as a clause.
        remedy: What to do for longer ones, as a sentence without its full stop.
    """

    tokens: int
    reason: str
    remedy: str

    @property
    def why(self) -> str:
        """Reason and remedy, as the end of a sentence."""
        return f"{self.reason}. {self.remedy}."


def position_limit(config: Any) -> PositionLimit | None:
    """The limit of a model, if it has one: its positions, or what rotary factors are chosen by.

    With ``rope_type="longrope"`` (Phi-3, Phi-4) Transformers takes the short or the long factors for all that a call
    holds, by its largest position. A short document packed beside one that is longer than
    ``original_max_position_embeddings`` would be rotated otherwise than alone, and the ranks that share a document
    might take different factors for it.

    Args:
        config: The model's, or its text model's.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    limit = None
    if positions is not None:
        limit = PositionLimit(
            positions,
            f"the model has positions for {positions:,} (max_position_embeddings)",
            f"Set max_document_tokens={positions} (of WLBTrainingArguments) to have longer documents split, or extend "
            "the model's positions",
        )
    for rotary in _rotary_settings(text):
        original = rotary.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        same = list(rotary.get("short_factor") or ()) == list(rotary.get("long_factor") or ())
        if rotary.get("rope_type", rotary.get("type")) != "longrope" or original is None or same:
            continue
        if limit is None or original < limit.tokens:
            limit = PositionLimit(
                int(original),
                f"{type(text).__name__} rotates positions by other factors from {original:,} tokens on (longrope), and "
                "all documents that are packed together by those of the longest",
                f"Set max_document_tokens={original} (of WLBTrainingArguments) to have longer documents split, or let "
                "all documents have the long factors: config.rope_parameters['short_factor'] = "
                "config.rope_parameters['long_factor'] before the model is made",
            )
    return limit


def _rotary_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of every kind of them."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, Mapping) for value in found.values()):
        yield from (value for value in found.values() if isinstance(value, Mapping))
    elif found:
        yield found
