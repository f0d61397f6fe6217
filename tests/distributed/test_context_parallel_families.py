"""Model families under context parallelism: loss and every gradient equal documents run alone."""

import torch
import torch.distributed as dist

from hf_wlb.attention import AttentionContext, ShardTensors, document_attention_enabled
from hf_wlb.data import WLBDataCollator
from hf_wlb.parallel import ProcessGroupExchange
from hf_wlb.sharding import Sharder, ShardingConfig, ShardPlan, shard_layout, shift_labels
from hf_wlb.workload import AnalyticWorkload
from tests.numerics.test_families import ACCEPTED, build, documents
from tests.support.oracle import gradients_of, loss_and_gradients, relative_error, worst_error
from tests.support.spawn import run_distributed
from tests.support.tolerances import MODEL, MODEL_EXPERTS, NEGATIVE_CONTROL_FACTOR

STRATEGIES = ("per_sequence", "per_document", "placed", "adaptive")


def plan_for(strategy: str, rows: list[list[int]], cp: int) -> ShardPlan:
    threshold = 6 if strategy == "placed" else None
    config = ShardingConfig(cp, strategy, threshold, max_token_skew=0.3)  # type: ignore[arg-type]
    return Sharder(config, AnalyticWorkload.from_crossover(8)).plan([len(row) for row in rows])


def sharded_loss_and_gradients(model, rows, plan, context, labels_shifted_late=False):
    """Loss and gradients of the whole micro-batch, added up over the ranks of the default group."""
    whole = WLBDataCollator()([{"input_ids": row} for row in rows])
    layout = shard_layout(plan, context.cp_rank)
    tokens = torch.from_numpy(layout.tokens)
    targets = torch.from_numpy(shift_labels(whole["labels"][0].numpy(), plan.lengths))
    number = int((targets != -100).sum())
    own = targets[tokens]
    if labels_shifted_late:
        own = torch.cat([whole["labels"][0, tokens][1:], torch.tensor([-100])])
    model.zero_grad()
    with document_attention_enabled(model):
        output = model(
            input_ids=whole["input_ids"][:, tokens],
            position_ids=torch.from_numpy(layout.position_ids)[None],
            labels=own[None],
            shift_labels=own[None],
            num_items_in_batch=number,
            use_cache=False,
            wlb_shard=ShardTensors.of(layout),
            wlb_context=context,
        )
    output.loss.backward()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    return loss, gradients_of(model)


def errors_of_families(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    context = AttentionContext(exchange=ProcessGroupExchange(), kv_head_groups=2)
    rows, found = documents(), {}
    for number, name in enumerate(names):
        model = build(ACCEPTED[name]).double()
        expected = loss_and_gradients(model, rows)
        plan = plan_for(STRATEGIES[number % len(STRATEGIES)], rows, world_size)
        loss, gradients = sharded_loss_and_gradients(model, rows, plan, context)
        found[name] = max(relative_error(loss, torch.tensor(expected[0])), worst_error(gradients, expected[1]))
    return found


def test_every_family_with_two_ranks() -> None:
    for errors in run_distributed(errors_of_families, 2, list(ACCEPTED), timeout_s=400):
        assert len({ACCEPTED[name].kind for name in errors}) >= 20
        for name, error in errors.items():
            assert error <= (MODEL_EXPERTS if ACCEPTED[name].experts else MODEL), name


def errors_of_strategies(rank: int, world_size: int) -> dict[str, float]:
    rows = [*documents(), [5] * 17, [9, 8, 7] * 5]
    found = {}
    for regather in (True, False):
        context = AttentionContext(exchange=ProcessGroupExchange(), regather=regather)
        model = build(ACCEPTED["gpt_oss, sinks"]).double()
        expected = loss_and_gradients(model, rows)
        for strategy in STRATEGIES:
            loss, gradients = sharded_loss_and_gradients(model, rows, plan_for(strategy, rows, world_size), context)
            error = max(relative_error(loss, torch.tensor(expected[0])), worst_error(gradients, expected[1]))
            found[f"{strategy}, regather {regather}"] = error
    late = sharded_loss_and_gradients(model, rows, plan_for("per_document", rows, world_size), context, True)
    found["labels shifted after sharding"] = worst_error(late[1], expected[1])
    return found


def test_every_strategy_with_four_ranks() -> None:
    errors = run_distributed(errors_of_strategies, 4, timeout_s=400)[0]
    control = errors.pop("labels shifted after sharding")
    assert len(errors) == 8 and max(errors.values()) <= MODEL_EXPERTS, errors
    assert control > NEGATIVE_CONTROL_FACTOR * MODEL_EXPERTS


def refusals(rank: int, world_size: int) -> list[str]:
    """Plans that differ or do not fit: what every rank is told."""
    rows, sentences = documents(), []
    model = build(ACCEPTED["llama"])
    for case in ("differing", "not fitting", "another rank's"):
        exchange = ProcessGroupExchange()
        plan = plan_for("per_sequence" if case == "differing" and rank == 1 else "per_document", rows, world_size)
        layout = shard_layout(plan, 0 if case == "another rank's" else rank)
        length = len(layout.tokens) - (case == "not fitting" and rank == 1)
        ids = torch.ones(1, length, dtype=torch.long)
        try:
            with document_attention_enabled(model), torch.no_grad():
                model(
                    input_ids=ids,
                    position_ids=torch.from_numpy(layout.position_ids)[None, :length],
                    use_cache=False,
                    wlb_shard=ShardTensors.of(layout),
                    wlb_context=AttentionContext(exchange=exchange),
                )
            sentences.append("nothing")
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def test_a_wrong_plan_is_refused_on_every_rank() -> None:
    first, second = run_distributed(refusals, 2, timeout_s=400)
    for sentences in (first, second):
        assert "plans of different micro-batches or settings" in sentences[0]
    assert "rank 1 cannot attend: the plan is for a shard of" in first[1]
    assert "the plan is for a shard of" in second[1]
    assert "rank 1 cannot attend: the plan is for rank 0" in first[2] and "this process is rank 1 of 2" in second[2]
