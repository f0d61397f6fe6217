"""What a planned run balances by: the workload of its simulation, as a file that ``WLBTrainer`` reads."""

from __future__ import annotations

from dataclasses import replace

from hf_wlb.simulator.costs import StepModel
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload

_SHARES = (1 / 16, 1 / 4, 1.0, 2.0)  # of the context, at which the exchange is written down


def trainer_workload(model: StepModel) -> AnalyticWorkload | ProfiledWorkload:
    """The workload that ``model`` simulates by, of a kind that ``load_workload`` knows.

    Attention and linear work are priced as in ``model.workload``. The exchange of keys and values is so at
    ``context_length`` tokens, and elsewhere nearly.

    Args:
        model: Of the split that is to be run.
    """
    if model.profile is None:
        counted = model.attention_model
        assert isinstance(counted, AnalyticWorkload), "without a profile attention is counted"
        return replace(
            counted,
            linear_seconds_per_token=model.workload.linear_seconds_per_token,
            exchange_seconds_per_token=_exchange_of_a_token(model),
        )
    tokens = model.context_length // model.split.cp_size
    layers = len(model.shape.layers)
    # All that is no attention as the linear work of one layer; a forward that runs twice is counted so on reading.
    passes = 3 if model.gradient_checkpointing else 2
    share = model.workload.linear_seconds_per_token * tokens / layers / passes
    profile = replace(
        model.profile.profile,
        metadata=_with_width(model),
        linear=((tokens, share, share),),
        head=(),
        embedding=(),
        collectives=_collectives(model),
    )
    return ProfiledWorkload(profile, model.gradient_checkpointing, tokens)


def _exchange_of_a_token(model: StepModel) -> float:
    """As ``AnalyticWorkload`` wants it: among very many ranks."""
    ranks = model.split.cp_size
    if ranks == 1:
        return 0.0
    return model.workload.exchange(model.context_length, ranks) / model.context_length * ranks / (ranks - 1)


def _with_width(model: StepModel) -> dict[str, object]:
    """Metadata that say how wide a token's keys and values are, with the numbers' type that is reckoned with here."""
    assert model.profile is not None
    known = model.profile.profile.metadata
    return {**known, "dtype": "bfloat16", "model": {**known["model"], "kv_width": _width(model)}}


def _width(model: StepModel) -> int:
    """Of the first layer on one rank."""
    return int(model.shape.kv_width(model.shape.layers[0], model.split.tp_size))


def _collectives(model: StepModel) -> tuple[tuple[str, int, int, float], ...]:
    """Times of the exchange in the mean layer, by the bytes of all ranks' keys and values."""
    ranks, layers = model.split.cp_size, len(model.shape.layers)
    if ranks == 1:
        return ()
    once = replace(model.workload.exchange_costs, gathers=1)
    found: list[tuple[str, int, int, float]] = []
    for place, operation in enumerate(("all_gather", "reduce_scatter")):
        for tokens in sorted({max(ranks, int(share * model.context_length)) for share in _SHARES}):
            found.append((operation, ranks, 2 * _width(model) * tokens, once.parts(tokens)[place] / layers))
    return tuple(found)
