"""The collator under context parallelism: every rank's shard in one process, labels, dummies, workers, refusals."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hf_wlb.attention import ShardTensors
from hf_wlb.data import StreamingPackedDataset, WLBDataCollator, WLBDataLoader
from hf_wlb.sharding import SHARDING_STRATEGIES, Sharder, ShardingConfig, unshard_order
from tests.support.documents import WORKLOAD, all_tokens, marked_documents, packing

KEYS = {"input_ids", "labels", "shift_labels", "position_ids", "use_cache", "wlb_shard", "wlb_info"}
LENGTHS = (12, 1, 8, 33, 2, 5, 1)


def sharder(cp_size: int, strategy: Any = "adaptive", **settings: Any) -> Sharder:
    return Sharder(ShardingConfig(cp_size=cp_size, strategy=strategy, **settings), WORKLOAD)


def shards_of(rows: Any, cp_size: int, strategy: str = "adaptive", **options: Any) -> list[dict[str, Any]]:
    return [WLBDataCollator(sharder=sharder(cp_size, strategy), cp_rank=r, **options)(rows) for r in range(cp_size)]


def whole(shards: list[dict[str, Any]], name: str) -> list[int]:
    """What the ranks hold together, in the order of the micro-batch."""
    return torch.cat([s[name][0] for s in shards])[torch.from_numpy(unshard_order(shards[0]["wlb_info"].plan))].tolist()


def test_a_document_in_zigzag_has_these_labels() -> None:
    first, second = shards_of([{"input_ids": list(range(8))}], 2, "per_document")
    assert set(first) == KEYS
    assert first["input_ids"].tolist() == [[0, 1, 6, 7]] and second["input_ids"].tolist() == [[2, 3, 4, 5]]
    assert first["shift_labels"].tolist() == [[1, 2, 7, -100]] and second["shift_labels"].tolist() == [[3, 4, 5, 6]]
    assert first["position_ids"].tolist() == [[0, 1, 6, 7]] and second["position_ids"].tolist() == [[2, 3, 4, 5]]
    assert first["labels"].tolist() == first["shift_labels"].tolist() and first["use_cache"] is False
    assert {first[name].dtype for name in ("input_ids", "labels", "shift_labels", "position_ids")} == {torch.int64}


def test_two_documents_are_four_segments_of_all_tokens() -> None:
    shards = shards_of([{"input_ids": list(range(12))}, {"input_ids": list(range(20, 28))}], 2, "per_document")
    assert whole(shards, "input_ids") == [*range(12), *range(20, 28)]
    for shard in shards:
        plan: ShardTensors = shard["wlb_shard"]
        assert int((plan.chunks.q.diff() > 0).sum()) == 4
        assert plan.tokens == shard["input_ids"].shape[1] == 10


@pytest.mark.parametrize("strategy", SHARDING_STRATEGIES)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_every_strategy_holds_every_token_once(cp_size: int, strategy: str) -> None:
    rows = marked_documents(LENGTHS)
    rows[2]["labels"] = [-100] * 3 + rows[2]["input_ids"][3:]
    shards = shards_of(rows, cp_size, strategy)
    assert whole(shards, "input_ids") == [token for row in rows for token in row["input_ids"]]
    assert whole(shards, "position_ids") == [place for n in LENGTHS for place in range(n)]
    targets = [label for row in rows for label in [*row.get("labels", row["input_ids"])[1:], -100]]
    assert whole(shards, "shift_labels") == whole(shards, "labels") == targets
    plain = WLBDataCollator()(rows)  # as many targets as without context parallelism
    assert sum(t != -100 for t in targets) == int((plain["labels"][:, 1:] != -100).sum())
    assert len({shard["wlb_shard"].digest for shard in shards}) == 1
    info = shards[0]["wlb_info"]
    assert not info.topped_up and len(info.plan.predicted) == cp_size
    assert info.plan.strategy == strategy or strategy == "adaptive"


@pytest.mark.parametrize("lengths", [(), (1,), (3,), (1, 1)])
def test_too_few_tokens_are_topped_up(lengths: tuple[int, ...]) -> None:
    shards = shards_of(marked_documents(lengths), 4, pad_token_id=9)
    assert whole(shards, "input_ids")[sum(lengths) :] == [9] * 8
    assert whole(shards, "shift_labels")[sum(lengths) :] == [-100] * 8
    assert all(shard["input_ids"].shape[1] >= 1 for shard in shards)
    assert all(shard["wlb_info"].topped_up for shard in shards)


@pytest.mark.parametrize("lengths", [(4,), (1, 1, 1, 1), (2, 3)])
def test_as_many_tokens_as_ranks_are_enough(lengths: tuple[int, ...]) -> None:
    for strategy in SHARDING_STRATEGIES:
        shards = shards_of(marked_documents(lengths), 4, strategy)
        assert sum(shard["input_ids"].shape[1] for shard in shards) == sum(lengths)
        assert all(shard["input_ids"].shape[1] >= 1 for shard in shards)
        assert not shards[0]["wlb_info"].topped_up


def test_one_rank_changes_nothing() -> None:
    rows = marked_documents(LENGTHS)
    found, plain = WLBDataCollator(sharder=sharder(1))(rows), WLBDataCollator()(rows)
    assert found.keys() == plain.keys()
    assert all(np.array_equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("cp_rank", [-1, 2])
def test_a_rank_that_there_is_not_is_refused(cp_rank: int) -> None:
    with pytest.raises(ValueError, match=rf"cp_rank must be from 0 to 1 \(cp_size - 1\).*got {cp_rank}\.$"):
        WLBDataCollator(sharder=sharder(2), cp_rank=cp_rank)
    with pytest.raises(ValueError, match=r"cp_rank must be from 0 to 0 .* Give it a sharder for several ranks"):
        WLBDataCollator(cp_rank=1)


def test_a_copy_for_a_rank() -> None:
    class Own(WLBDataCollator):
        pass

    plain = Own(pad_token_id=3)
    given = plain.for_rank(sharder(2), 1)
    assert type(given) is Own and (given.pad_token_id, given.cp_rank, given.cp_size) == (3, 1, 2)
    assert plain.sharder is None and plain.fingerprint == 0
    assert given.for_rank(sharder(2), 1) is given
    for other in ((sharder(2), 0), (sharder(4), 1), (sharder(2, "placed"), 1)):
        with pytest.raises(ValueError, match=r"This collator gives shards of rank 1 by .*Leave its sharder away"):
            given.for_rank(*other)


def test_the_fingerprint_tells_settings_apart() -> None:
    different = [sharder(2), sharder(4), sharder(2, "placed"), sharder(2, max_token_skew=0.1)]
    prints = {WLBDataCollator(sharder=each).fingerprint for each in different}
    assert len(prints) == 4 and all(0 < value < 2**63 for value in prints)
    assert WLBDataCollator(sharder=sharder(1)).fingerprint == 0


def ranks_of_a_loader(kind: str, **options: Any) -> list[list[dict[str, Any]]]:
    rows, lengths = marked_documents(LENGTHS * 3), LENGTHS * 3
    assert len(rows) == len(lengths)
    found = []
    for rank in range(2):
        collator = WLBDataCollator(sharder=sharder(2), cp_rank=rank)
        if kind == "map":
            data: Any = WLBDataLoader(rows, packing(), WORKLOAD, collator=collator, **options)
        else:
            data = StreamingPackedDataset(rows, packing(), WORKLOAD, collator=collator)
        found.append(list(data))
    return found


@pytest.mark.parametrize(
    ("kind", "options"), [("map", {}), ("map", {"num_workers": 2}), ("map", {"device": "cpu"}), ("stream", {})]
)
def test_loaders_hand_out_shards(kind: str, options: dict[str, Any]) -> None:
    first, second = ranks_of_a_loader(kind, **options)
    tokens: Counter[int] = Counter()
    for shards in zip(first, second, strict=True):
        assert shards[0]["wlb_shard"].digest == shards[1]["wlb_shard"].digest
        assert shards[0]["wlb_info"].plan.digest() == shards[0]["wlb_shard"].digest
        tokens.update(token for token in whole(list(shards), "input_ids") if token)
    assert tokens == all_tokens(LENGTHS * 3)


def test_a_shard_cannot_be_collated_again() -> None:
    collator = WLBDataCollator(sharder=sharder(2))
    micro_batch = collator(marked_documents(LENGTHS))
    assert collator([micro_batch])["wlb_shard"] is micro_batch["wlb_shard"]  # one process: as a stream gives it
    with pytest.raises(ValueError, match="was collated for 1 context-parallel rank, but this collator is for 2"):
        collator([WLBDataCollator()(marked_documents(LENGTHS))])
    with pytest.raises(ValueError, match="was collated for 2 context-parallel ranks, but this collator is for 1"):
        WLBDataCollator()([micro_batch])


def test_more_tokens_than_the_ranks_hold_are_refused() -> None:
    collator = WLBDataCollator(sharder=sharder(2, max_tokens_per_shard=20))
    with pytest.raises(ValueError, match="A micro-batch of 62 tokens does not fit 2 ranks of at most 20 tokens"):
        collator(marked_documents(LENGTHS))
