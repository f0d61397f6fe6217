"""A token that the model does not know is named under every split, by a rank that has it, and none waits for ever."""

from pathlib import Path
from typing import Any

import pytest

from hf_wlb import WLBTrainer
from tests.support.documents import WORKLOAD
from tests.support.spawn import RankError, run_distributed
from tests.support.tiny_llama import VOCABULARY, tiny_llama
from tests.support.training import arguments, rows_of

SPLITS: dict[str, dict[str, Any]] = {
    "dp": {},
    "cp": {"cp_size": 2},
    "tp": {"tp_size": 2},
    "fsdp": {"dp_shard_size": 2},
    "pp": {"pp_size": 2},
    "pp, opened": {"pp_size": 2},  # stages that are made one by one
}


def losses(rank: int, world_size: int, folder: str, split: str, token: int, evaluates: bool) -> float:
    """Train, or evaluate, documents of which one ends with this token."""
    rows = [*rows_of((5, 9, 14, 3, 7, 11, 6)), {"input_ids": [7, 8, token]}]
    model = tiny_llama().config if split == "pp, opened" else tiny_llama()
    options = {"gradient_accumulation_steps": 4, "max_steps": 2, **SPLITS[split]}
    trainer = WLBTrainer(model, arguments(folder, **options), None, rows, rows, workload=WORKLOAD)
    if evaluates:
        return float(trainer.evaluate()["eval_loss"])
    return float(trainer.train().training_loss)


@pytest.mark.parametrize("split", SPLITS)
def test_an_unknown_token_is_named(split: str, tmp_path: Path) -> None:
    # Of stages made one by one the first has no head, and the last no embedding: it sees the token as a label.
    names = "(input_ids|labels)" if split == "pp, opened" else "input_ids"
    for evaluates in (False, True):
        with pytest.raises(RankError, match=rf"ValueError: the {names} hold 128, but the model's vocabulary has 128"):
            run_distributed(losses, 2, str(tmp_path), split, VOCABULARY, evaluates)


def test_the_last_entry_is_known_under_every_split(tmp_path: Path) -> None:
    found = [run_distributed(losses, 2, str(tmp_path), split, VOCABULARY - 1, False) for split in SPLITS]
    assert all(min(values) > 0 for values in found)
