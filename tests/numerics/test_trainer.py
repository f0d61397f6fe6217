"""WLBTrainer on one process: exact losses and gradients, steps known beforehand, logs, and what it refuses."""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_wlb import WLBDataCollator, WLBTrainer
from hf_wlb.attention.registration import MASKLESS
from hf_wlb.callbacks import MetricsFileCallback, WLBProgressCallback
from tests.support.documents import WORKLOAD
from tests.support.oracle import in_double, loss_and_gradients, mean_loss, worst_error
from tests.support.tiny_llama import VOCABULARY, tiny_llama
from tests.support.tolerances import CHECKPOINTING, NEGATIVE_CONTROL_FACTOR, TRAINER, TRAINER_AFTER_STEPS
from tests.support.training import LENGTHS, arguments, check_first_step, rows_of, steps_by_epoch, train, trainer_of

# ---- loss and gradients ----

STEPS: dict[str, tuple[tuple[int, ...], int]] = {
    "documents of all lengths": (LENGTHS, 2),
    "one micro-batch a step": (LENGTHS, 1),
    "four micro-batches a step": (LENGTHS, 4),
    "a dummy micro-batch": ((13,), 2),
    "dummies and a micro-batch of one token": ((1, 20), 4),
    "a micro-batch of one-token documents": ((20, 1, 1), 2),
    "documents of two tokens": ((2, 2, 1), 2),
    "a document in pieces": ((45,), 4),
}


@pytest.mark.parametrize("case", STEPS)
def test_loss_and_gradients_are_the_token_mean_over_the_step(case: str, tmp_path: Path) -> None:
    lengths, accumulation = STEPS[case]
    rows = rows_of(lengths)
    _, recorder = train(tmp_path, rows, gradient_accumulation_steps=accumulation, max_steps=1)
    assert check_first_step(recorder, rows, tiny_llama()) <= TRAINER
    assert recorder.implementations == {MASKLESS}
    if "dumm" in case:
        assert any(not micro_batch.documents for micro_batch in recorder.plans[0].micro_batches)


def test_labels_of_the_data_set_count(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = rows_of()
    for row in rows:  # every prompt is masked
        row["labels"] = [-100 if place < len(row["input_ids"]) // 2 else t for place, t in enumerate(row["input_ids"])]
    _, recorder = train(tmp_path, rows, max_steps=1)
    assert check_first_step(recorder, rows, tiny_llama()) <= TRAINER


def test_every_step_of_two_epochs_and_the_weights_equal_the_oracle(tmp_path: Path) -> None:
    rows = rows_of()
    trainer, recorder = train(tmp_path, rows, num_train_epochs=2)
    model = in_double(tiny_llama())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, found in enumerate(recorder.losses):
        optimizer.zero_grad()
        loss = mean_loss(model, recorder.documents(step, rows))
        assert found == pytest.approx(float(loss.detach()), rel=TRAINER_AFTER_STEPS, abs=1e-12), step
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    assert len(recorder.losses) == trainer.state.global_step
    assert worst_error(trainer.model.state_dict(), model.state_dict()) <= TRAINER_AFTER_STEPS
    for first, last in ((0, steps_by_epoch(trainer)[0]), (steps_by_epoch(trainer)[0], len(recorder.plans))):
        pieces = [document for plan in recorder.plans[first:last] for document in plan.documents]
        assert sum(document.length for document in pieces) == sum(LENGTHS)  # each epoch holds every token once


class MicroBatchMeans(WLBTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        own = (inputs["labels"][..., 1:] != -100).sum().clamp(min=1) * self.args.gradient_accumulation_steps
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=own)


class SeeingEachOther(WLBDataCollator):
    def __call__(self, features):
        batch = super().__call__(features)
        bounds = batch["cu_seq_lens_q"][[0, -1]]
        return {**batch, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


def test_the_check_notices_a_mean_of_means(tmp_path: Path) -> None:
    trainer, recorder = trainer_of(tmp_path, rows_of((20, 3, 2)), max_steps=1)
    trainer.__class__ = MicroBatchMeans
    trainer.train()
    assert check_first_step(recorder, rows_of((20, 3, 2)), tiny_llama()) > NEGATIVE_CONTROL_FACTOR * TRAINER


def test_the_check_notices_documents_that_see_each_other(tmp_path: Path) -> None:
    _, recorder = train(tmp_path, max_steps=1, data_collator=SeeingEachOther())
    assert check_first_step(recorder, rows_of(), tiny_llama()) > NEGATIVE_CONTROL_FACTOR * TRAINER


def model_with_losses(losses: dict[int, float]) -> Any:
    """A Llama that predicts each of these tokens after itself, with exactly that loss."""
    model = tiny_llama()
    model.config.max_position_embeddings = 2048
    size, others = model.config.hidden_size, model.config.vocab_size - 1
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for place, (token, loss) in enumerate(losses.items()):
            model.model.embed_tokens.weight[token] = torch.nn.functional.one_hot(torch.tensor(place), size) * 10.0
            model.lm_head.weight[token, place] = -math.log(math.expm1(loss) / others) / math.sqrt(size)
    return model


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_sums_10_and_900_over_10_and_1000_tokens_are_0_901(accumulation: int, tmp_path: Path) -> None:
    rows = [{"input_ids": [5] * 11}, {"input_ids": [6] * 1001}]
    options = {"context_length": 1012, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    model = model_with_losses({5: 1.0, 6: 0.9})
    trainer, recorder = train(tmp_path, rows, model, eval_dataset=rows, learning_rate=0.0, **options)
    assert sum(1 for _ in recorder.plans[0].documents) == 2
    assert recorder.losses[0] == pytest.approx(910 / 1010, rel=TRAINER)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(910 / 1010, rel=TRAINER)


def test_a_step_of_one_token_documents_is_0_and_changes_nothing(tmp_path: Path) -> None:
    # Without the filter, which would hide a nan
    trainer, recorder = train(tmp_path, rows_of((1, 1, 1)), max_grad_norm=1.0, logging_nan_inf_filter=False)
    assert recorder.losses == [0.0] and trainer.state.global_step == 1
    assert all(bool((gradient == 0).all()) for gradient in recorder.gradients.values())
    for name, value in tiny_llama().state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def test_label_smoothing_is_exact_over_the_step(tmp_path: Path) -> None:
    rows = rows_of((20, 3, 1, 9, 1))
    _, recorder = train(tmp_path, rows, max_steps=1, label_smoothing_factor=0.2, gradient_accumulation_steps=3)
    assert check_first_step(recorder, rows, tiny_llama(), label_smoothing=0.2) <= TRAINER
    assert check_first_step(recorder, rows, tiny_llama()) > NEGATIVE_CONTROL_FACTOR * TRAINER


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    _, plain = train(tmp_path)
    _, replayed = train(tmp_path, gradient_checkpointing=True)
    assert replayed.losses == pytest.approx(plain.losses, rel=CHECKPOINTING)
    assert worst_error(replayed.gradients, plain.gradients) <= CHECKPOINTING


def test_a_lora_adapter_trains(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(), config)
    expected = in_double(model)
    trainer, recorder = train(tmp_path, rows_of(), model, max_steps=2, save_strategy="steps", save_steps=1)
    loss, gradients = loss_and_gradients(expected, recorder.documents(0, rows_of()))
    assert recorder.losses[0] == pytest.approx(loss, rel=TRAINER)
    assert worst_error(recorder.gradients, gradients) <= TRAINER
    assert all("lora" in name for name in gradients) and recorder.implementations == {MASKLESS}
    assert trainer.model.config._attn_implementation == "sdpa"
    _, resumed = train(
        tmp_path, rows_of(), expected.float(), max_steps=2, resume_from_checkpoint=tmp_path / "checkpoint-1"
    )
    assert resumed.losses == recorder.losses[1:]


def test_gpt2_trains_exactly(tmp_path: Path) -> None:
    """Its class has no loss type of its own, as if its loss were unknown."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **off, bos_token_id=1, eos_token_id=2))
    expected = in_double(model)
    _, recorder = train(tmp_path, rows_of(), model, max_steps=1)
    assert check_first_step(recorder, rows_of(), expected) <= TRAINER


# ---- epochs and steps ----


def steps_of_epochs(seed: int, epochs: int = 3) -> list[int]:
    from hf_wlb import WLBDataLoader

    config = arguments("unused").packing_config(1)
    loader = WLBDataLoader(rows_of(), config, WORKLOAD, seed=seed)
    return [loader.sampler.steps(epoch) for epoch in range(epochs)]


@functools.cache
def uneven_seed() -> int:
    """A seed whose first three epochs differ in their steps."""
    return next(seed for seed in range(200) if len(set(steps_of_epochs(seed, 2))) == 2)


def test_epochs_of_different_steps_are_counted_beforehand(tmp_path: Path) -> None:
    seed = uneven_seed()
    steps = steps_of_epochs(seed)
    trainer, recorder = train(tmp_path, num_train_epochs=3, data_seed=seed)
    assert trainer.state.max_steps == trainer.state.global_step == len(recorder.losses) == sum(steps)
    assert trainer.state.epoch == 3.0 and trainer.state.num_train_epochs == 3
    ends = [sum(steps[:1]), sum(steps[:2])]
    epochs = [log["epoch"] for log in recorder.logs if "loss" in log]
    assert [epochs[end - 1] for end in ends] == [1.0, 2.0] and epochs == sorted(epochs)


@pytest.mark.parametrize("epochs", [0.3, 1.5])
def test_a_part_of_an_epoch(epochs: float, tmp_path: Path) -> None:
    seed = uneven_seed()
    steps = steps_of_epochs(seed)
    trainer, _ = train(tmp_path, num_train_epochs=epochs, data_seed=seed)
    whole = math.ceil(epochs) - 1
    last = math.ceil(steps[whole] * (epochs - whole))
    assert trainer.state.max_steps == trainer.state.global_step == sum(steps[:whole]) + last
    assert trainer.state.epoch == pytest.approx(whole + last / steps[whole])


def test_max_steps_over_several_epochs(tmp_path: Path) -> None:
    seed = uneven_seed()
    steps = steps_of_epochs(seed)
    trainer, recorder = train(tmp_path, max_steps=steps[0] + steps[1] + 1, data_seed=seed)
    assert trainer.state.max_steps == trainer.state.global_step == len(recorder.plans) == sum(steps[:2]) + 1
    assert trainer.state.epoch == pytest.approx(2 + 1 / steps[2])
    assert [plan.step for plan in recorder.plans] == [*range(steps[0]), *range(steps[1]), 0]


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the train_dataset holds no documents"):
        train(tmp_path, [])


# ---- the model afterwards, logs ----


def test_the_attention_implementation_comes_back(tmp_path: Path) -> None:
    class Failing(MetricsFileCallback):
        def on_step_end(self, *args, **kwargs):
            raise RuntimeError("stop here")

    model = tiny_llama()
    train(tmp_path, model=model, max_steps=1)
    assert model.config._attn_implementation == "sdpa"
    trainer, _ = trainer_of(tmp_path, model=model, callbacks=[Failing(tmp_path / "metrics.jsonl")])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.train()
    assert model.config._attn_implementation == "sdpa"


def test_a_checkpoint_loads_where_hf_wlb_is_not_installed(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    folder = tmp_path / "checkpoint-1"
    assert "wlb" not in (folder / "config.json").read_text()
    program = (
        "import sys; sys.modules['hf_wlb'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "print(model.config._attn_implementation, model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    name, total = done.stdout.split()[-2:]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().item()
    assert name == "sdpa" and float(total) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_logs_and_metrics_file(tmp_path: Path) -> None:
    metrics = MetricsFileCallback(tmp_path / "new" / "metrics.jsonl")
    trainer, recorder = train(tmp_path, callbacks=[metrics], logging_steps=2, eval_dataset=rows_of((4, 9)))
    trainer.evaluate()
    logs = [log for log in recorder.logs if "loss" in log]
    names = {"imbalance", "delay", "time_gap", "tokens_per_step", "waiting_contexts", "plan_ms", "tokens_per_second"}
    assert all(names <= log.keys() for log in logs) and len(logs) == trainer.state.global_step // 2
    for place, log in enumerate(logs):
        plans = recorder.plans[2 * place : 2 * place + 2]
        assert log["tokens_per_step"] == sum(plan.tokens for plan in plans) / 2
        workloads = [[w for replica in plan.workloads() for w in replica] for plan in plans]
        assert log["imbalance"] == pytest.approx(sum(max(w) * len(w) / sum(w) for w in workloads) / 2)
        ages = [sum((p.step - d.arrived) * d.length for d in p.documents) / p.tokens for p in plans]
        assert log["delay"] == pytest.approx(sum(ages) / 2)
        assert log["tokens_per_second"] > 0
    lines = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == recorder.losses
    assert [line["step"] for line in lines if "loss" in line] == [2 * place + 2 for place in range(len(logs))]
    assert "train_loss" in lines[-2] and "eval_loss" in lines[-1]
    pieces = [document for plan in recorder.plans for document in plan.documents]
    assert lines[-2]["packing_documents"] == len(LENGTHS)
    assert lines[-2]["packing_split"] == sum(document.start > 0 for document in pieces) == 1
    assert lines[-2]["packing_dropped"] == lines[-2]["packing_truncated"] == 0
    assert all(line["seconds"] >= 0 for line in lines)


@pytest.mark.parametrize("disable", [False, True])
def test_the_progress_bar_with_and_without_tqdm(disable: bool, tmp_path: Path, capsys: Any) -> None:
    trainer, recorder = trainer_of(tmp_path, disable_tqdm=disable, eval_dataset=rows_of((4, 9)), eval_strategy="epoch")
    bars = [c for c in trainer.callback_handler.callbacks if isinstance(c, WLBProgressCallback)]
    assert len(bars) == (0 if disable else 1)
    trainer.train()
    shown = capsys.readouterr()
    assert ("tok/s" in shown.err) is not disable
    assert len(recorder.losses) == trainer.state.global_step


def test_no_layer_reads_the_documents_bounds_back(tmp_path: Path, monkeypatch: Any) -> None:
    """On a GPU each of them would wait for it: the trainer hands on a plan made in the CPU's memory."""
    from hf_wlb.attention import registration

    def reading(*args: Any) -> Any:
        raise AssertionError("cu_seq_lens_q was read")

    monkeypatch.setattr(registration, "_whole_documents", reading)
    trainer, recorder = train(tmp_path, max_steps=1, eval_dataset=rows_of((4, 9)))
    assert check_first_step(recorder, rows_of(), tiny_llama()) <= TRAINER
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.attention_kernels == ("reference",)


# ---- what is refused ----


def test_another_collator_is_replaced_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    from transformers import DefaultDataCollator

    trainer, recorder = train(tmp_path, max_steps=1, data_collator=DefaultDataCollator())
    assert "data_collator DefaultDataCollator is replaced by WLBDataCollator" in caplog.text
    assert isinstance(trainer.data_collator, WLBDataCollator)
    assert check_first_step(recorder, rows_of(), tiny_llama()) <= TRAINER
    own = WLBDataCollator(pad_token_id=3)
    assert trainer_of(tmp_path, data_collator=own)[0].data_collator is own


class Unsuited(torch.nn.Module):
    def forward(self, input_ids, labels=None, **kwargs):
        return input_ids


def test_models_that_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, MixtralConfig, MixtralForCausalLM

    def another_loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])

    mean_of_means, no_number = tiny_llama(), tiny_llama()
    mean_of_means.loss_function = another_loss
    no_number.accepts_loss_kwargs = False

    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2}
    router = MixtralConfig(**small, **heads, num_key_value_heads=1, num_local_experts=2, output_router_logits=True)
    refused = {
        "got a Unsuited": Unsuited(),
        "BertForMaskedLM has attention_probs_dropout_prob=0.1": BertForMaskedLM(BertConfig(**small, **heads)),
        "BertSelfAttention asks for attention that is not causal": BertForMaskedLM(
            BertConfig(**small, **heads, attention_probs_dropout_prob=0.0)
        ),
        "the loss of LlamaForCausalLM is not the sum of its next-token losses": mean_of_means,
        "LlamaForCausalLM takes no num_items_in_batch": no_number,
        "MixtralForCausalLM adds a router loss": MixtralForCausalLM(router),
        "LlamaForCausalLM has attention_dropout=0.1": tiny_llama(attention_dropout=0.1),
    }
    for sentence, model in refused.items():
        with pytest.raises(ValueError, match=sentence):
            trainer_of(tmp_path, model=model)


def test_the_number_of_tokens_is_an_integer(tmp_path: Path) -> None:
    """FSDP2 under bf16 would round a floating-point number to three digits."""
    trainer, _ = trainer_of(tmp_path)
    batches = [batch for batch, _ in zip(trainer.get_train_dataloader(), range(2), strict=False)]
    number = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    assert number.dtype == torch.int64
    assert int(number) == sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def test_a_model_that_is_made_anew_has_the_fused_loss(tmp_path: Path) -> None:
    trainer = WLBTrainer(
        args=arguments(tmp_path, max_steps=1),
        train_dataset=rows_of(),
        workload=WORKLOAD,
        model_init=lambda: tiny_llama(),
    )
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert trainer._head_loss is not None and trainer._head_loss.model is trainer.model


def test_a_frozen_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parameter of the model is to be trained"):
        trainer_of(tmp_path, model=tiny_llama().requires_grad_(False))


def test_missing_data_sets_and_another_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    trainer, _ = trainer_of(tmp_path, eval_dataset=None)
    with pytest.raises(ValueError, match="requires an eval_dataset"):
        trainer.evaluate()
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="requires a train_dataset"):
        trainer.train()
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(ImportError, match=r"a Trainer without _run_epoch.*install transformers"):
        trainer_of(tmp_path)


def test_documents_beyond_the_models_positions_are_refused_before_the_first_step(tmp_path: Path) -> None:
    rows = rows_of((4, 40, 9))
    model = tiny_llama()
    model.config.max_position_embeddings = 32
    trainer, _ = trainer_of(tmp_path, rows, model, context_length=64)
    with pytest.raises(ValueError, match=r"document of 40 tokens .* positions for 32 .* max_document_tokens=32"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ValueError, match="document of 40 tokens"):
        trainer.evaluate(rows)
    trainer, recorder = train(tmp_path, rows, model, context_length=64, max_document_tokens=32)
    assert sum(document.length for document in recorder.plans[0].documents) == 53


def test_a_model_whose_config_has_no_padding_token(tmp_path: Path) -> None:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    config = CodeGenConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, bos_token_id=1, eos_token_id=2
    )
    assert not hasattr(config, "pad_token_id")
    trainer, recorder = train(tmp_path, model=CodeGenForCausalLM(config), max_steps=1)
    assert trainer.data_collator.pad_token_id == 0 and recorder.losses[0] > 0
