"""Several ranks whose model is called on other inputs in training, or whose attention is not switched back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_wlb import plain_attention
from tests.support.spawn import RankError, run_distributed
from tests.support.training import TWO_RANKS, train, trainer_of

PROMPT = torch.tensor([[1, 2, 3, 4]])
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


class Switches(TrainerCallback):
    """Forgets to switch back, on some of the ranks."""

    def __init__(self, rank: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.switches = rank in ranks

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.switches and state.global_step == 1:
            model.set_attn_implementation("sdpa")

    on_prediction_step = on_step_end


class Generates(TrainerCallback):
    """By all ranks after every step."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with plain_attention(model):
            self.tokens.append(model.eval().generate(PROMPT, **GREEDY)[0].tolist())


def refused(action: Any) -> str:
    try:
        action()
    except ValueError as error:  # not the RuntimeError of a rank that hears of another one's
        return str(error)
    return "nothing"


def ranks_that_switch(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, split in TWO_RANKS.items():
        options: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, **split}
        trainer, recorder = trainer_of(folder, callbacks=[Switches(rank)], **options)
        found[name] = refused(trainer.train), len(recorder.losses)
    return found


def test_every_rank_refuses_by_itself(tmp_path: Path) -> None:
    for found in run_distributed(ranks_that_switch, 2, str(tmp_path)):
        for name in TWO_RANKS:
            said, steps = found[name]
            assert "attention implementation is 'sdpa' now" in said and "hf_wlb.plain_attention" in said, name
            assert steps == 1, name


def one_that_switches(rank: int, world_size: int, folder: str, split: str) -> None:
    train(folder, max_steps=3, callbacks=[Switches(rank, (1,))], **TWO_RANKS[split])


@pytest.mark.parametrize("split", ["cp_size", "pp_size"])
def test_one_rank_that_switches_ends_all(split: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="attention implementation is 'sdpa' now"):
        run_distributed(one_that_switches, 2, str(tmp_path), split, timeout_s=120)


def ranks_that_generate(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, split in TWO_RANKS.items():
        if name != "pp_size":  # a stage does not generate
            generates = Generates()
            _, recorder = train(folder, max_steps=2, callbacks=[generates], **split)
            _, alone = train(folder, max_steps=2, **split)
            found[name] = recorder.losses, alone.losses, generates.tokens
    return found


def test_ranks_generate_and_training_goes_on_as_without_it(tmp_path: Path) -> None:
    found = run_distributed(ranks_that_generate, 2, str(tmp_path))
    for name, (losses, alone, tokens) in found[0].items():
        assert losses == alone and len(tokens) == 2, name
        assert found[1][name][2] == tokens, name
