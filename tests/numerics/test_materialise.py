"""Stages that are made without the whole model: their weights are the whole model's, from files or at random."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_wlb.parallel import ParallelMesh, ParameterLayout
from hf_wlb.parallel.checkpoint.reading import TensorFiles
from hf_wlb.parallel.pipeline import PipelineStage, cut_stage, find_parts
from hf_wlb.parallel.pipeline.materialise import materialise
from hf_wlb.parallel.pipeline.skeleton import skeleton, weights_folder
from tests.numerics.test_families import ACCEPTED, ALTERNATING, build
from tests.support.tiny_llama import tiny_llama

LAYERS = 4
SPLITS = {2: (range(0, 3), range(3, 4)), 4: tuple(range(place, place + 1) for place in range(LAYERS))}
#: By its name among the families that are accepted, and whether its embeddings are tied.
FAMILIES = {
    "llama": ("llama", False),
    "llama, tied": ("llama", True),
    "qwen3": ("qwen3", False),
    "gemma2": ("gemma2", True),
    "gemma3": ("gemma3", True),
    "gpt_neox, names that are others in files": ("gpt_neox", False),
    "mixtral": ("mixtral", False),
    "qwen3_moe": ("qwen3_moe", False),
    "gpt_oss": ("gpt_oss, sinks", False),
}
TOKENS = torch.tensor([[3, 1, 2, 5, 2]])


def whole_model(name: str) -> Any:
    kind, tied = FAMILIES[name]
    family = ACCEPTED[kind]
    settings = {**family.settings, "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    if "layer_types" in settings:
        settings["layer_types"] = ALTERNATING * (LAYERS // 2)
    return build(family._replace(settings=settings))


def options_of(name: str) -> dict[str, Any]:
    return {"attn_implementation": "eager"} | (
        {"experts_implementation": "eager"} if ACCEPTED[FAMILIES[name][0]].experts else {}
    )


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody fills is not a number."""
    original = torch.empty_like

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty_like", poisoned)


def stage_of(source: Any, layers: range, folder: Any, seed: int = 0, **options: Any) -> PipelineStage:
    model = skeleton(source, **options)
    stage = cut_stage(model, find_parts(model), layers)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, ParameterLayout(ParallelMesh(), copies=stage.copies), folder, seed=seed)
    return stage


def whole_of(source: Any, folder: Any = None, seed: int = 0, **options: Any) -> Any:
    model = skeleton(source, **options)
    materialise(model, ParameterLayout(ParallelMesh()), folder, seed=seed)
    return model


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))


def differing(stages: list[PipelineStage], expected: Any) -> list[str]:
    """Names of what stages have otherwise than the whole model, to the last bit, and of what none of them has."""
    whole, seen, found = tensors_of(expected), set(), []
    for stage in stages:
        for name, tensor in tensors_of(stage.model).items():
            seen.add(name)
            same = tensor.dtype == whole[name].dtype and torch.equal(tensor, whole[name])
            found += [] if same else [name]
    return sorted({*found, *(whole.keys() - seen)})


def logits_of(stages: list[PipelineStage]) -> torch.Tensor:
    hidden: Any = None
    inputs = {"input_ids": TOKENS, "position_ids": torch.arange(TOKENS.numel())[None]}
    for stage in stages:
        model = stage.model.eval()
        hidden = stage.run(lambda given, model=model: model(**given, use_cache=False).logits, inputs, hidden)
    return hidden


class Reads:
    """Names and bytes of what is read out of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.bytes = 0
        original = TensorFiles.read

        def read(files: TensorFiles, name: str, ranges: Any = None) -> Any:
            found = original(files, name, ranges)
            self.names.append(name)
            self.bytes += 0 if found is None else found.nbytes
            return found

        monkeypatch.setattr(TensorFiles, "read", read)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_a_checkpoint_are_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_model(name).save_pretrained(tmp_path / "one")
    whole_model(name).save_pretrained(tmp_path / "several", max_shard_size="30KB")
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3 and (tmp_path / "one" / "model.safetensors").is_file()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "one", **options_of(name))
    stored = {key: tensor.nbytes for file in files for key, tensor in load_file(file).items()}
    for folder, ranges in ((tmp_path / "one", SPLITS[2]), (tmp_path / "several", SPLITS[4])):
        stages, reads = [], []
        for layers in ranges:
            with monkeypatch.context() as patch:
                spy = Reads(patch)
                stages.append(stage_of(folder, layers, folder, **options_of(name)))
            assert spy.bytes == sum(stored[key] for key in spy.names) and len(set(spy.names)) == len(spy.names)
            reads.append(set(spy.names))
        assert differing(stages, expected) == []
        assert torch.equal(logits_of(stages), expected(input_ids=TOKENS, use_cache=False).logits)
        # a tensor is read by one stage, the tied one by both ends
        twice = {key for one, other in zip(reads, reads[1:] + reads[:1], strict=True) for key in one & other}
        assert twice == set(stages[-1].copies.values()) and bool(twice) == FAMILIES[name][1]
        assert set().union(*reads) == stored.keys()
        assert stages[0].model.generation_config == expected.generation_config
        assert stages[0].model.name_or_path == str(folder) and not stages[0].model.training


def test_the_comparison_notices_another_checkpoint(tmp_path: Path) -> None:
    model = whole_model("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-6
    model.save_pretrained(tmp_path)
    stages = [stage_of(tmp_path, layers, tmp_path, **options_of("llama")) for layers in SPLITS[2]]
    assert differing(stages, whole_model("llama")) == ["model.layers.3.mlp.up_proj.weight"]
    assert differing(stages[:1], model) == sorted(
        {name for name in tensors_of(model) if name.startswith(("model.layers.3.", "model.norm", "lm_head"))}
    )


def test_the_weights_of_a_skeleton_take_no_memory_and_its_buffers_are_right() -> None:
    for name in FAMILIES:
        model, expected = skeleton(whole_model(name).config), whole_model(name)
        assert all(parameter.is_meta for parameter in model.parameters())
        buffers = dict(expected.named_buffers())
        assert buffers and buffers.keys() == dict(model.named_buffers()).keys()
        assert all(torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]


# ---- random weights ----


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_do_not_depend_on_the_stages(name: str) -> None:
    config = whole_model(name).config
    state = torch.random.get_rng_state()
    whole = whole_of(config)
    for ranges in SPLITS.values():
        torch.manual_seed(len(ranges))  # what the caller does with its random state changes nothing
        assert differing([stage_of(config, layers, None) for layers in ranges], whole) == []
    other = differing([stage_of(config, layers, None, seed=1) for layers in SPLITS[2]], whole)
    drawn = [key for key, tensor in whole.named_parameters() if tensor.unique().numel() > 1]
    assert set(other) - {"lm_head.weight"} == set(drawn) - {"lm_head.weight"}
    assert ("lm_head.weight" in other) and whole.training
    torch.random.set_rng_state(state)
    whole_of(config)
    assert torch.equal(torch.random.get_rng_state(), state)
    tails = [tensor.flatten()[-8:].tolist() for key, tensor in whole.named_parameters() if key in drawn]
    assert all(tail not in tails[:place] for place, tail in enumerate(tails))  # no two begin alike


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_are_distributed_as_transformers_draws_them(name: str) -> None:
    config = whole_model(name).config
    config.vocab_size = 4096
    found, reference = whole_of(config), AutoModelForCausalLM.from_config(config)
    expected = dict(reference.named_parameters())
    assert expected.keys() == dict(found.named_parameters()).keys()
    for key, tensor in found.named_parameters():
        theirs, count = expected[key], tensor.numel()
        if theirs.unique().numel() == 1:
            assert torch.equal(tensor, theirs), key
            continue
        spread = theirs.std().item()
        assert abs(tensor.std().item() / spread - 1) < 5 / math.sqrt(count), key
        assert abs(tensor.mean().item()) < 5 * spread / math.sqrt(count), key
    embeddings = found.get_input_embeddings()
    if embeddings.padding_idx is not None:
        assert not embeddings.weight[embeddings.padding_idx].any()


def test_the_copy_of_tied_embeddings_has_their_padding_row() -> None:
    config = whole_model("llama, tied").config
    first, last = (stage_of(config, layers, None).model for layers in SPLITS[2])
    assert torch.equal(last.lm_head.weight, first.model.embed_tokens.weight)
    assert not last.lm_head.weight[0].any() and last.lm_head.weight[1].any()
    whole = whole_of(config)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight


def test_projections_that_a_block_initialises_once_more() -> None:
    config = build(ACCEPTED["gpt2"]).config
    config.n_embd, config.n_layer = 128, 8
    block = whole_of(config).transformer.h[3]
    found = [block.mlp.c_proj.weight.std().item(), block.mlp.c_fc.weight.std().item()]
    assert found == pytest.approx([0.02 / 4, 0.02], rel=0.02)


class _Unsaid(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].scale = torch.nn.Parameter(torch.ones(3))


class _AsAWhole(LlamaForCausalLM):
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            torch.nn.init.ones_(module.lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Unsaid, r"LlamaModel does not say how model.layers.1.scale begins.*Load weights from a folder"),
        (_AsAWhole, r"_AsAWhole initialises itself as a whole, lm_head.weight of its parts too.*with from_config"),
    ],
)
def test_an_initialisation_that_cannot_be_done_in_parts_is_refused(
    kind: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_llama().config
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, **options: kind(config))
    with pytest.raises(ValueError, match=message):
        whole_of(config)
    if kind is _AsAWhole:
        with pytest.raises(ValueError, match=r"_AsAWhole initialises itself as a whole .*'StandIn' object"):
            stage_of(config, range(0, 1), None)


def test_a_copy_of_what_is_no_embedding_is_refused() -> None:
    layout = ParameterLayout(ParallelMesh(), copies={"lm_head.weight": "model.layers.0.mlp.up_proj.weight"})
    model = skeleton(tiny_llama().config)
    cut_stage(model, find_parts(model), range(1, 2))
    with pytest.raises(ValueError, match=r"ties lm_head.weight to model.layers.0.*, which is no embedding"):
        materialise(model, layout)


# ---- what may be given, and what is refused ----


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Other tensors in a checkpoint of one file; None takes one out."""
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_types_are_rounded_as_from_pretrained_does(checkpoint: Path) -> None:
    for dtype in ("bfloat16", torch.float64, "auto"):
        found = whole_of(checkpoint, checkpoint, dtype=dtype)
        assert differing([stage_of(checkpoint, range(2), checkpoint, dtype=dtype)], found) == []
        expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        assert found.config.dtype == expected.config.dtype
        for name, tensor in tensors_of(expected).items():
            assert torch.equal(tensors_of(found)[name], tensor) and tensors_of(found)[name].dtype == tensor.dtype
    with pytest.raises(ValueError, match="dtype='float31' is no type"):
        skeleton(checkpoint, dtype="float31")


def test_the_type_is_that_of_the_weights_where_the_configuration_says_none(checkpoint: Path) -> None:
    tiny_llama().bfloat16().save_pretrained(checkpoint)
    reconfigure(checkpoint, dtype=None)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).dtype == torch.bfloat16
    assert skeleton(checkpoint).dtype == torch.bfloat16


def test_modules_that_stay_in_float32(tmp_path: Path) -> None:
    build(ACCEPTED["deepseek_v3, latent"]).bfloat16().save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    kinds = {name: tensor.dtype for name, tensor in tensors_of(expected).items()}
    assert set(kinds.values()) == {torch.float32, torch.bfloat16}
    found = whole_of(tmp_path, tmp_path)
    assert {name: tensor.dtype for name, tensor in tensors_of(found).items()} == kinds
    assert all(torch.equal(tensors_of(found)[name], tensor) for name, tensor in tensors_of(expected).items())


def test_a_checkpoint_that_holds_the_model_s_own_names(tmp_path: Path) -> None:
    """Without the conversion of experts that Transformers does."""
    model = whole_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    stages = [stage_of(tmp_path, layers, tmp_path, **options_of("qwen3_moe")) for layers in SPLITS[2]]
    assert differing(stages, model) == []


@pytest.mark.parametrize("saved", ["the head alone", "both", "both, and they differ"])
def test_tied_weights_that_are_saved_otherwise(saved: str, checkpoint: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(checkpoint)
    head = model.lm_head.weight.detach().clone()
    if saved == "the head alone":
        rewrite(checkpoint, {"lm_head.weight": head, "model.embed_tokens.weight": None})
    else:
        rewrite(checkpoint, {"lm_head.weight": head + (saved != "both")})
    ranges = (range(0, 1), range(1, 2))
    if saved == "both, and they differ":
        for layers in ranges:
            with pytest.raises(ValueError, match=r"another lm_head.weight, but LlamaForCausalLM ties them"):
                stage_of(checkpoint, layers, checkpoint)
    else:
        assert differing([stage_of(checkpoint, layers, checkpoint) for layers in ranges], model) == []


LAST = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({LAST: None}, rf"lacks {LAST}, which LlamaForCausalLM of this configuration has"),
        ({LAST: torch.zeros(4, 32)}, rf"{LAST} is \[4, 32\] in .*, but \[48, 32\] in the model"),
        ({LAST: torch.zeros(48, 32, dtype=torch.int8)}, rf"{LAST} is int8 in .*, but float32 in the model: it is quan"),
        ({LAST: torch.zeros(48, 32).to(torch.float8_e4m3fn)}, rf"{LAST} is float8_e4m3fn in .*: it is quantized"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_stage_that_needs_it(
    changed: dict[str, Any], message: str, checkpoint: Path
) -> None:
    rewrite(checkpoint, changed)
    with pytest.raises(ValueError, match=message):
        stage_of(checkpoint, range(1, 2), checkpoint)
    stage_of(checkpoint, range(0, 1), checkpoint)  # which has no business with it


def test_tensors_of_no_stage_are_told_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"  # of checkpoints of long ago: nothing to tell
    rewrite(checkpoint, {"model.layers.2.mlp.up_proj.weight": torch.ones(1), old: torch.ones(4)})
    for layers in (range(0, 1), range(1, 2), range(2)):
        caplog.clear()
        stage_of(checkpoint, layers, checkpoint)
        assert len(caplog.messages) == 1
        assert "has model.layers.2.mlp.up_proj.weight, which LlamaForCausalLM of this conf" in caplog.text
    caplog.clear()
    model = skeleton(checkpoint)
    materialise(model, ParameterLayout(ParallelMesh(tp_rank=1)), checkpoint)
    assert not caplog.messages


def test_files_that_are_no_safetensors_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights in safetensors files \(model.safetensors.index.json or"):
        weights_folder(checkpoint)
    torch.save(tiny_llama().state_dict(), checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r", only pytorch_model.bin\. .*write it with save_pretrained"):
        stage_of(checkpoint, range(0, 1), checkpoint)


def test_what_a_skeleton_is_not_made_of(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"not of a LlamaForCausalLM. Of a model, give its config"):
        skeleton(tiny_llama())
    reconfigure(checkpoint, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"is quantized .*cut into pipeline stages"):
        skeleton(checkpoint)


def test_the_callers_configuration_and_random_state_stay() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    before, state = config.to_dict(), torch.random.get_rng_state()
    model = skeleton(config, dtype=torch.bfloat16, attn_implementation="eager")
    assert config.to_dict() == before and torch.equal(torch.random.get_rng_state(), state)
    assert model.dtype == model.config.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"


def test_a_model_that_was_made_whole_on_the_meta_device_gets_its_buffers() -> None:
    for name in ("gemma3", "gpt_oss"):
        config = whole_model(name).config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert all(buffer.is_meta for buffer in model.buffers())
        materialise(model, ParameterLayout(ParallelMesh()))
        expected = tensors_of(whole_of(config))
        assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors_of(model).items())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the hub that must do, as compute nodes have it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--someone--tiny", "0123456789abcdef" * 2 + "01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    yield repository / "snapshots" / commit


@pytest.mark.parametrize("size", ["1GB", "30KB"])
def test_a_name_on_the_hub(size: str, hub: Path) -> None:
    model = whole_model("llama")
    model.save_pretrained(hub, max_shard_size=size)
    stages = [stage_of("someone/tiny", layers, "someone/tiny", **options_of("llama")) for layers in SPLITS[2]]
    assert differing(stages, model) == []
    assert stages[0].model.name_or_path == "someone/tiny"
    assert weights_folder("someone/tiny") == weights_folder("someone/tiny", revision="main") == str(hub)
    for file in hub.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"someone/tiny holds no weights in .*cache lacks them, and HF_HUB_OFFLINE"):
        weights_folder("someone/tiny")
    shutil.rmtree(hub)
    with pytest.raises(OSError):
        skeleton("someone/tiny")
