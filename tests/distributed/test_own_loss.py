"""A subclass's compute_loss where ranks share micro-batches, whose labels are shifted and sharded."""

from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from hf_wlb import WLBTrainer
from tests.support.spawn import RankError, run_distributed
from tests.support.training import Recorder, trainer_of


class AddsToIt(WLBTrainer):
    """Calls the loss that is there, as most do."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class ShiftsAgain(WLBTrainer):
    """As one writes it for whole documents."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        inputs.pop("shift_labels", None)
        logits = model(**inputs).logits
        return cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="sum") / num_items_in_batch


def losses_of(rank: int, world_size: int, folder: str, kind: type[WLBTrainer], cp_size: int) -> list[float]:
    trainer, recorder = trainer_of(folder, max_steps=2, cp_size=cp_size)
    trainer.__class__ = kind
    trainer.train()
    assert isinstance(recorder, Recorder)
    return recorder.losses


def test_one_that_calls_the_librarys_is_the_same(tmp_path: Any) -> None:
    found = [run_distributed(losses_of, 2, str(tmp_path), kind, 2)[0] for kind in (WLBTrainer, AddsToIt)]
    assert found[0] == found[1]


def test_one_that_shifts_labels_again_is_refused(tmp_path: Any) -> None:
    sentence = r"compute_loss of ShiftsAgain computes a loss by itself.*cp_size=2.*super\(\)\.compute_loss"
    with pytest.raises(RankError, match=sentence):
        run_distributed(losses_of, 2, str(tmp_path), ShiftsAgain, 2)


def test_without_sharing_it_is_the_users_own(tmp_path: Any) -> None:
    assert all(losses_of(0, 1, str(tmp_path), ShiftsAgain, 1))
