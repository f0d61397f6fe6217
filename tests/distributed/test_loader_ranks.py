"""Loaders on several ranks: shares that add up, plans compared, and packed rows under a plain Trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.documents import WORKLOAD, all_tokens, marked_documents, packing, plain, tokens_of
from tests.support.spawn import run_distributed

LENGTHS = [3, 20, 1, 21, 7, 16, 2, 9, 40, 5, 5, 12, 1, 19, 8, 4, 6, 17, 3, 11]


def _loader(rank: int, world_size: int, lengths: list[int] | None = None, **options: Any) -> Any:
    from hf_wlb.data import WLBDataLoader

    rows = marked_documents(LENGTHS if lengths is None else lengths)
    return WLBDataLoader(rows, packing(world_size), WORKLOAD, dp_rank=rank, **options)


def _stream(rank: int, world_size: int, lengths: list[int] | None = None) -> Any:
    from hf_wlb.data import StreamingPackedDataset

    rows = marked_documents(LENGTHS if lengths is None else lengths)
    return StreamingPackedDataset(rows, packing(world_size), WORKLOAD, dp_rank=rank)


def _two_passes(rank: int, world_size: int, kind: str) -> tuple[list[Any], Any]:
    """Run a whole pass, and the rest of another one after a resume; return both, and a state in between."""
    make = {"map": lambda: _loader(rank, world_size, num_workers=1), "stream": lambda: _stream(rank, world_size)}
    data = make[kind]()
    found, state = [], None
    for place, micro_batch in enumerate(data):
        found.append(plain(micro_batch))
        if place == 2:
            state = json.dumps(data.state_dict())
    resumed = make[kind]()
    resumed.load_state_dict(json.loads(state or ""))
    assert [plain(m) for m in resumed] == found[3:]
    return found, state


def _both_kinds(rank: int, world_size: int) -> dict[str, tuple[list[Any], Any]]:
    return {kind: _two_passes(rank, world_size, kind) for kind in ("map", "stream")}


def test_every_token_once_over_all_ranks_and_one_state_for_all() -> None:
    for results in zip(*(values.values() for values in run_distributed(_both_kinds, 2)), strict=True):
        assert len({len(found) for found, _ in results}) == 1
        tensors = [{"input_ids": torch.tensor(m["input_ids"])} for found, _ in results for m in found]
        assert tokens_of(tensors) == all_tokens(LENGTHS)
        assert results[0][1] == results[1][1]


def _disagreement(rank: int, world_size: int, what: str) -> tuple[int, str]:
    """Iterate until the ranks are found to disagree; return how many micro-batches came before, and the error."""
    if what == "seed":
        data = _loader(rank, world_size, seed=rank)
    elif what == "steps":  # equal at first, then rank 1 has more
        data = _stream(rank, world_size, [9] * (40 + 40 * rank))
    elif what == "content":  # known lengths, other tokens
        rows = marked_documents(LENGTHS)
        rows[0]["input_ids"][0] += rank
        other = _loader(rank, world_size)
        data = type(other)(rows, packing(world_size), WORKLOAD, dp_rank=rank)
    elif what == "tokens":  # other documents of the same lengths
        data = _stream(rank, world_size)
        rows = marked_documents(LENGTHS)
        rows[-1]["input_ids"][0] += rank  # read by a later step
        data = type(data)(rows, packing(world_size), WORKLOAD, dp_rank=rank)
    else:
        data = _loader(rank, world_size)
        if rank:
            data.set_epoch(1)
    handed_out = 0
    try:
        for _ in data:
            handed_out += 1
    except RuntimeError as error:
        return handed_out, str(error)
    return handed_out, "no error"


def _disagreements(rank: int, world_size: int) -> dict[str, tuple[int, str]]:
    return {what: _disagreement(rank, world_size, what) for what in ("seed", "steps", "tokens", "content", "epoch")}


def test_a_disagreement_is_an_error_on_every_rank() -> None:
    first, second = run_distributed(_disagreements, 2)
    assert first == second
    for what, (handed_out, error) in first.items():
        assert error.startswith("The ranks do not agree on "), what
        assert "rank 0 has" in error and "rank 1 has" in error
        assert handed_out % 2 == 0, "found before a step's first micro-batch"
    assert first["seed"][0] == first["epoch"][0] == first["content"][0] == 0
    assert first["steps"][0] > 0 and first["tokens"][0] > 0


BIG = 2**63 - 1


def _compare(rank: int, world_size: int) -> list[str]:
    import datasets
    from accelerate import Accelerator

    from hf_wlb.data import WLBDataCollator, WLBDataLoader, pack_dataset
    from hf_wlb.parallel import process_count, verify_agreement

    assert process_count() == world_size
    said = []
    for values in ([BIG, BIG, BIG], [BIG, -(2**63), BIG]):
        try:
            verify_agreement(values[rank], "the number of cats")
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    loader = _loader(rank, world_size)
    assert Accelerator().prepare(loader) is loader  # not shared out once more
    solver, table = packing(1, packer="solver"), datasets.Dataset.from_list(marked_documents([3]))
    micro_batch = WLBDataCollator()([{"input_ids": [1, 2]}])
    for refused in (
        lambda: WLBDataLoader(marked_documents([3]), solver, WORKLOAD),
        lambda: pack_dataset(table, solver, WORKLOAD),
        lambda: WLBDataCollator()([micro_batch]),
    ):
        with pytest.raises(ValueError) as caught:
            refused()
        said.append(str(caught.value))
    return said


def test_the_error_names_ranks_and_values_and_what_ranks_cannot_share_is_refused() -> None:
    expected = f"The ranks do not agree on the number of cats: ranks 0, 2 have {BIG}; rank 1 has {-(2**63)}. "
    for agreeing, differing, solver, packed_by_solver, shared_twice in run_distributed(_compare, 3):
        assert agreeing == ""
        assert differing.startswith(expected)
        assert "Plan once for all of them with pack_dataset" in solver
        assert "PackedDataset.load_from_disk on every rank" in packed_by_solver
        assert "without prepare" in shared_twice


def test_one_process_agrees_with_itself() -> None:
    from hf_wlb.parallel import process_count, verify_agreement

    assert process_count() == 1
    verify_agreement(-(2**63), "anything")
    with pytest.raises(ValueError, match="does not fit"):
        verify_agreement(2**63, "anything")


# ---- pack_dataset in a plain Trainer, on two processes ----


def _train_packed(rank: int, world_size: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_wlb.data import PackedDataset
    from tests.support.tiny_llama import tiny_llama

    losses: list[float] = []

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                losses.append(logs["loss"])

    packed = PackedDataset.load_from_disk(f"{folder}/packed")
    arguments = TrainingArguments(
        f"{folder}/out",
        num_train_epochs=1,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **packed.training_arguments(),
    )
    model = tiny_llama()
    trainer = Trainer(
        model, arguments, train_dataset=packed, data_collator=packed.data_collator(), callbacks=[Losses()]
    )
    trainer.train()
    assert trainer.state.global_step == packed.steps
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_packed_rows_in_a_plain_trainer_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from hf_wlb.data import pack_dataset
    from tests.support.tiny_llama import random_documents, reference_loss, tiny_llama

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    documents = random_documents(LENGTHS)
    table = datasets.Dataset.from_dict({"input_ids": documents})
    packed = pack_dataset(table, packing(2, max_document_tokens=20), WORKLOAD)
    packed.save_to_disk(tmp_path / "packed")
    results = run_distributed(_train_packed, 2, str(tmp_path))

    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    expected = []
    for step in range(packed.steps):
        pieces = []
        for row in packed.select(range(4 * step, 4 * step + 4)):
            ids = row["input_ids"]
            for length in row["document_lengths"]:
                pieces.append(ids[:length])
                ids = ids[length:]
        loss = reference_loss(model, pieces)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for losses, state in results:
        if losses:  # the main process logs
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)
    assert results[0][0]
