"""The recipes for conversations as users run them, and one's own model and data in both training recipes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_wlb.data.chat import load_chats
from hf_wlb.data.tokenization import train_byte_level_bpe
from hf_wlb.trainer import check_processes
from tests.support.recipes import load_recipe
from tests.support.scripts import quiet_environment, run_script
from tests.support.source_tree import REPOSITORY
from tests.support.tiny_llama import tiny_llama

RECIPE = "recipes/sft_chat.py"
SMALL = {
    "config": "recipes/configs/chat_demo.yaml",
    "max_documents": 90,
    "held_out": 10,
    "vocab_size": 400,
    "context_length": 512,
    "max_conversation_tokens": 512,
    "gradient_accumulation_steps": 2,
    "max_steps": 5,
    "warmup_steps": 1,
    "disable_tqdm": True,
    "use_cpu": True,
}
CHATS = [
    [{"role": "user", "content": f"What is {i} plus {i}?"}, {"role": "assistant", "content": f"It is {2 * i}." * i}]
    for i in range(1, 13)
]


def arguments(**options: Any) -> list[str]:
    return [str(word) for name, value in {**options, **SMALL}.items() for word in (f"--{name}", value)]


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    """Two processes as the launch file says."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "recipes/launch/cpu_2_processes.yaml"]
    command = [sys.executable, *launcher, *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env=quiet_environment(), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the demonstration's conversations in a file, because making all of them takes seconds."""
    file = tmp_path_factory.mktemp("built-in") / "chats.jsonl"
    load_chats(None).select(range(0, 1000, 11)).to_json(file)
    return file


@pytest.fixture(scope="module")
def finished(built_in: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("chat") / "run"
    done = run_script(RECIPE, *arguments(dataset=built_in, output_dir=folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_it_trains_and_leaves_a_model_that_chats(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, output = finished
    found = losses(folder)
    assert len(found) == 5 and found[-1] < found[0] - 0.05
    assert "90 of 90" in output and "Loss on held-out documents" in output
    assert "next-fit" in output and (folder / "micro_batch_workloads.png").stat().st_size > 5_000
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>" and model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer) == 400
    prompt = tokenizer.apply_chat_template(CHATS[0][:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nWhat is 1 plus 1?<|im_end|>\n<|im_start|>assistant\n"


def test_two_processes_of_the_launch_file_give_the_same_losses(
    finished: tuple[Path, str], built_in: Path, tmp_path: Path
) -> None:
    done = launch(RECIPE, *arguments(dataset=built_in, output_dir=tmp_path, cp_size=2))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cp 2, sharding: adaptive" in done.stdout
    assert losses(tmp_path) == pytest.approx(losses(finished[0]), abs=1e-5)


def test_processes_that_would_train_side_by_side_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = load_recipe("recipe_parts")
    _, training = load_recipe("sft_chat").parse_arguments(["--use_cpu", "--output_dir", str(tmp_path)])
    check_processes(training)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        parts.run(training, lambda: pytest.fail("it went on"))
    assert "2 processes were started, but there is no GPU for them" in capsys.readouterr().err


# ---- one's own model and data ----


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in a folder, with a tokenizer that knows no chat, and files of data."""
    folder = tmp_path_factory.mktemp("own")
    model = tiny_llama()
    model.resize_token_embeddings(258)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    train_byte_level_bpe(["a"], 258).save_pretrained(folder / "model")
    (folder / "fresh").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / "fresh" / name).write_text((folder / "model" / name).read_text())
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    datasets.Dataset.from_dict({"body": [f"document {i} " * i for i in range(1, 20)]}).to_parquet(
        folder / "text.parquet"
    )
    return folder


def own_arguments(own: Path, folder: Path, *more: str, data: str, model: str = "model") -> list[str]:
    words = ["--model", own / model, "--dataset", own / data, "--output_dir", folder, "--context_length", 256, *more]
    return [*map(str, words), "--use_cpu", "--max_steps", "1", "--disable_tqdm", "True"]


@pytest.mark.parametrize("name", ["llama_long_context", "sft_chat", "trl_sft"])
def test_the_demonstrations_settings_are_for_the_demonstration_only(
    name: str, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(name)
    here = ["--output_dir", str(tmp_path), "--use_cpu"]
    _, demonstration = recipe.parse_arguments(here)
    assert demonstration.learning_rate == 3e-3
    needed = [] if name == "trl_sft" else ["--context_length", "512"]
    for given in (["--model", str(own / "model")], [f"--dataset={own / 'chats.jsonl'}"]):
        _, training = recipe.parse_arguments([*here, *given, *needed, "--bf16", "False"])
        assert training.learning_rate < 1e-4 and training.warmup_steps == 0
        assert getattr(training, "plan_pp_size", 1) == 1
        if needed:
            with pytest.raises(SystemExit):
                recipe.parse_arguments([*here, *given])
            assert "context_length is missing" in capsys.readouterr().err


def test_long_context_starts_from_a_local_model_and_corpus(own: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = load_recipe("llama_long_context")
    words = own_arguments(own, tmp_path, "--text_column", "body", data="text.parquet")
    trainer, _ = recipe.prepare(*recipe.parse_arguments(words))
    assert trainer.model.dtype == torch.float32  # updated in float32, though saved in bf16
    saved = AutoModelForCausalLM.from_pretrained(own / "model").state_dict()
    assert all(torch.equal(value, saved[name].float()) for name, value in trainer.model.state_dict().items())
    assert trainer.train().global_step == 1

    words = own_arguments(own, tmp_path, "--text_column", "body", data="text.parquet", model="fresh")
    models = [recipe.prepare(*recipe.parse_arguments(words))[0].model for _ in range(2)]
    first, second = (model.state_dict()["model.layers.0.mlp.up_proj.weight"] for model in models)
    assert torch.equal(first, second)  # fresh, but the same on every process
    assert not torch.equal(first, saved["model.layers.0.mlp.up_proj.weight"].float())


def test_sft_of_a_base_model_that_gets_a_chat_format(own: Path, tmp_path: Path) -> None:
    recipe = load_recipe("sft_chat")
    with pytest.raises(ValueError, match="has no chat template"):
        recipe.prepare(*recipe.parse_arguments(own_arguments(own, tmp_path, data="chats.jsonl")))
    words = own_arguments(own, tmp_path, "--chat_template", "chatml", data="chats.jsonl")
    with pytest.raises(ValueError, match="lora_rank would leave untrained"):
        recipe.prepare(*recipe.parse_arguments([*words, "--lora_rank", "4"]))
    trainer, rows = recipe.prepare(*recipe.parse_arguments([*words, "--held_out", "2"]))
    assert trainer.model.get_input_embeddings().num_embeddings == len(trainer.processing_class) == 260
    assert trainer.model.generation_config.eos_token_id == trainer.processing_class.eos_token_id
    assert rows["conversations"].startswith("12 of 12 conversations")
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (10, 2)
    assert trainer.train().global_step == 1
    long = own_arguments(
        own, tmp_path, "--chat_template", "chatml", "--max_conversation_tokens", "60", data="chats.jsonl"
    )
    with pytest.raises(ValueError, match="have more than max_tokens=60"):
        recipe.prepare(*recipe.parse_arguments(long))
    _, rows = recipe.prepare(*recipe.parse_arguments([*long, "--oversize_conversations", "skip"]))
    assert "too long" in rows["conversations"]


def test_sft_with_a_template_file_trains_adapters(own: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    recipe = load_recipe("sft_chat")
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% endfor %}".replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}").replace(
            "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}"
        )
    )
    words = own_arguments(own, tmp_path, "--chat_template", str(file), "--lora_rank", "4", data="chats.jsonl")
    trainer, _ = recipe.prepare(*recipe.parse_arguments(words))
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert trainer.train().global_step == 1
    labels = trainer.train_dataset[0]["labels"]
    assert trainer.processing_class.decode([t for t in labels if t != -100]) == "It is 2.<|endoftext|>"


# ---- TRL ----


def trl_trainer(folder: Path, dataset: Path, *more: str) -> Any:
    recipe = load_recipe("trl_sft")
    options = {
        "config": REPOSITORY / "recipes" / "configs" / "trl_demo.yaml",
        "dataset": dataset,
        "output_dir": folder,
        "max_documents": 12,
        "vocab_size": 300,
        "max_length": 200,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "max_steps": 2,
        "disable_tqdm": True,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return recipe.prepare(*recipe.parse_arguments([*words, "--use_cpu", *more]))


def mean_loss(model: Any, documents: Any, *, masked: bool) -> float:
    """Of all targets of these documents, each run alone."""
    total, count = 0.0, 0
    with torch.no_grad():
        for document in documents:
            ids, labels = torch.tensor([document["input_ids"]]), torch.tensor(document["labels"])
            targets = labels[1:] if masked else ids[0, 1:]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100).item()
            count += int((targets != -100).sum())
    return total / count


def test_trl_trains_on_answers_only(built_in: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    trainer = trl_trainer(tmp_path, built_in)
    documents = list(trainer.train_dataset)
    assert max(len(document["input_ids"]) for document in documents) <= 200
    expected = mean_loss(trainer.model.eval(), documents[:6], masked=True)
    control = mean_loss(trainer.model, documents[:6], masked=False)
    trainer.train()
    first = next(row["loss"] for row in trainer.state.log_history if "loss" in row)
    assert first == pytest.approx(expected, abs=2e-4)  # TRL rounds what it logs
    assert abs(control - expected) > 2e-3


def test_trl_trains_adapters(built_in: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    trainer = trl_trainer(tmp_path, built_in, "--lora_rank", "4")
    assert trainer.train().global_step == 2
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="packing and padding_free are for TRL's own collator"):
        trl_trainer(tmp_path, built_in, "--packing", "True")
