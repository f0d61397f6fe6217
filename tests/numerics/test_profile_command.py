"""Measured profiles: what is measured is what the model does, within the time, and what comes out is read back.

The clock is a made-up one that counts: the FLOPs of matrix products in a forward and in its backward.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import hf_wlb.compilation as compilation
from hf_wlb.attention import AttentionContext
from hf_wlb.attention.kernels import AttentionOptions, ReferenceKernel
from hf_wlb.attention.segments import Segments
from hf_wlb.cli import app
from hf_wlb.profiling import (
    AttentionBudget,
    LinearBench,
    ProfileOptions,
    attention_points,
    forward_backward_seconds,
    held_out_errors,
    measure_profile,
)
from hf_wlb.profiling.no_kernel import CopyKernel
from hf_wlb.profiling.pieces import ModelPieces, micro_batch
from hf_wlb.sharding import Sharder, ShardingConfig
from hf_wlb.workload import ProfiledWorkload, count_model, load_workload
from tests.numerics.test_stage_costs_measured import added_products, config_of, tiny
from tests.support.compiled import graphs

CPU = torch.device("cpu")
QUICK = ProfileOptions(quick=True, dtype=torch.float32)


def attended(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a kernel's forward by shapes [documents, heads, tokens, head size], the mask not regarded."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))


def attended_backward(dout: Any, *shapes: Any, **kwargs: Any) -> int:
    return 5 * attended(*shapes) // 2


COUNTED = {
    torch.ops.aten.addmm_: added_products,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attended,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attended_backward,
}


def flops(forward: Callable[[], Any], backward: Callable[[Any], object]) -> tuple[float, float]:
    """What both multiply, in millions of millions; never nothing, as on a clock."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as first:
        out = forward()
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as second:
        backward(out)
    return (first.get_total_flops() + 1) / 1e12, (second.get_total_flops() + 1) / 1e12


def profile_of(config: Any, options: ProfileOptions = QUICK, **more: Any) -> dict[str, Any]:
    return measure_profile(config, CPU, options, timer=flops, clock=lambda: 0.0, **more)


def test_linear_work_is_the_layers_matrices_and_no_attention() -> None:
    config = tiny()
    bench = LinearBench(config, CPU, torch.float32, timer=flops)
    kinds = bench.kinds()
    assert [(kind.place, kind.count, kind.window) for kind in kinds] == [(0, 4, None)]
    shape = kinds[0].shape
    assert (shape.heads, shape.kv_heads, shape.head_size, shape.values, shape.softcap) == (4, 2, 8, 8, None)
    found = bench.time(kinds, [100, 30])
    weights, head = count_model(config).layers[0].weights, count_model(config).head_weights
    for tokens, sample in zip((30, 100), found["linear"], strict=True):
        assert sample["tokens"] == tokens
        assert sample["forward_seconds"] * 1e12 == pytest.approx(2 * weights * tokens + 1)
        assert sample["backward_seconds"] * 1e12 == pytest.approx(4 * weights * tokens + 1)
    for sample in found["head"]:
        both = sample["forward_seconds"] + sample["backward_seconds"]
        assert both * 1e12 == pytest.approx(6 * head * sample["tokens"] + 2)
    assert [sample["forward_seconds"] for sample in found["embedding"]] == [1e-12, 1e-12]
    # Negative control: with its attention the same layer multiplies more.
    inputs = micro_batch(config, np.array([100]), CPU, AttentionContext(kernel=ReferenceKernel()))
    layer = ModelPieces(config, CPU, torch.float32, inputs).layer(0)
    for real, bare in zip(flops(layer.forward, layer.backward), ("forward_seconds", "backward_seconds"), strict=True):
        assert real > found["linear"][1][bare] * 1.05


class TypedCopy(CopyKernel):
    """Keeps the types of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def fill_gradients(self, gradients: Any, sources: Any) -> None:
        self.types |= {tensor.dtype for tensor in (*gradients, *sources)}
        super().fill_gradients(gradients, sources)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_by_autocast_as_the_trainer_does(dtype: torch.dtype) -> None:
    """Attention sees the type, while weights, their gradients and hidden states are float32; numbers are random."""
    kernel = TypedCopy()
    inputs = micro_batch(tiny(), np.array([40, 24]), CPU, AttentionContext(kernel=kernel))
    kept: dict[Any, Any] = {}
    pieces = ModelPieces(tiny(), CPU, dtype, inputs, kept=kept)
    for piece in (pieces.before(), pieces.layer(0), pieces.after("chunked")):
        out = piece.forward()
        assert out.dtype == torch.float32
        piece.backward(out)
        if piece.gradient is not None:
            assert piece.gradient.dtype == torch.float32 and float(piece.gradient.std()) > 0.9
    assert kernel.types == {dtype}
    for made in kept.values():
        for parameter in made.stage.model.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is None or parameter.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "softcap"),
    [("gemma2", True), ("gemma3", False), ("deepseek_v3, latent", False)],
)
def test_layers_are_told_apart_by_how_they_attend(name: str, softcap: bool) -> None:
    config = config_of(name)
    profile = profile_of(config)
    found = {layer["window"]: layer["count"] for layer in profile["layers"]}
    counted = [layer.window for layer in count_model(config).layers]
    assert found == {window: counted.count(window) for window in counted}
    kinds = LinearBench(config, CPU, torch.float32, timer=flops).kinds()
    assert (kinds[0].shape.softcap is not None) == softcap
    widths = count_model(config).layers[0]
    assert kinds[0].shape.kv_width == widths.kv_width
    assert kinds[0].shape.heads * kinds[0].shape.head_size == widths.qk_width


def test_a_profile_is_the_same_for_the_same_times_and_is_read_back(tmp_path: Path) -> None:
    config = tiny()
    profile = profile_of(config)
    assert profile == profile_of(config) and profile["metadata"]["seconds"] == 0.0
    model = ProfiledWorkload.from_dict(profile)
    assert ProfiledWorkload.from_dict(json.loads(json.dumps(profile))) == model
    assert profile["metadata"]["model"]["num_hidden_layers"] == 4 and profile["metadata"]["model"]["tp_size"] == 1
    weights = count_model(config)
    assert model.linear(1000) == pytest.approx(6e-9 * weights.weights, rel=1e-3)
    held_out = profile["metadata"]["held_out"]
    assert held_out["attention"]["count"] == 8 and held_out["documents"]["count"] >= 2
    # A clock that counts is without noise: linear work is met exactly, attention but for the kernel's blocks.
    assert held_out["linear"]["p90_error"] < 0.01 and held_out["attention"]["median_error"] < 0.3
    again = ProfiledWorkload.from_dict(profile_of(config, ProfileOptions(quick=True, dtype=torch.float32, seed=5)))
    assert again.attention(500) == model.attention(500)  # other shapes held out, the same profile
    repeated = ProfileOptions(quick=True, dtype=torch.float32, gradient_checkpointing=True)
    assert ProfiledWorkload.from_dict(profile_of(config, repeated)).linear(1000) > model.linear(1000)


def test_errors_are_those_of_shapes_that_the_profile_does_not_hold() -> None:
    def document(tokens: int, factor: float = 1.0) -> dict[str, float]:
        seconds = factor * tokens * (tokens + 1) / 2
        return {"q_len": tokens, "kv_len": tokens, "forward_seconds": seconds, "backward_seconds": 2 * seconds}

    def linear(tokens: int, factor: float = 1.0) -> dict[str, float]:
        return {"tokens": tokens, "forward_seconds": factor * tokens, "backward_seconds": factor * tokens}

    profile = {
        "schema": "hf_wlb.profile/1",
        "metadata": {"device": "", "dtype": "bfloat16", "model": {}, "versions": {}},
        "layers": [{"count": 3, "window": 10}],
        "attention": [document(10), document(1000)],
        "linear": [linear(10), linear(1000)],
        "head": [linear(1000)],
        "gradient_checkpointing": True,
    }
    found = held_out_errors(profile, [document(100), document(50, 2.0), document(400, 0.8)], [linear(77, 4.0)])
    assert found["documents"]["count"] == 3 and "chunks" not in found
    assert found["documents"]["median_error"] == pytest.approx(0.25)  # none, a half, a quarter
    assert found["documents"]["p90_error"] == pytest.approx(0.45)
    assert found["linear"]["median_error"] == pytest.approx(0.75)
    assert found["samples"]["linear"][0]["predicted"] == pytest.approx(2 * 77)


def test_what_is_measured_goes_by_the_time_there_is() -> None:
    fast = AttentionBudget(seconds=60.0, seconds_per_pair=1e-10)
    assert fast.points(131_072) == attention_points(131_072)
    before = len(attention_points(131_072)) + 1
    for seconds in (20.0, 5.0, 1.0):
        budget = AttentionBudget(seconds=seconds, seconds_per_pair=1e-9)
        points = budget.points(131_072)
        assert len(points) < before
        before = len(points)
        longest = max(points)
        assert longest[0] == longest[1] and all(keys <= longest[1] for _, keys in points)
        assert budget.cost(longest) <= seconds / 4
        others = budget.random_points(longest[1], 40, seed=1)
        assert 4 <= len(others) <= 40 and others == budget.random_points(longest[1], 40, seed=1)
        assert others != budget.random_points(longest[1], 40, seed=2)
    assert AttentionBudget(seconds=1e-9, seconds_per_pair=1.0).points(1000)[-1] == (62, 62)


def test_what_does_not_fit_is_left_out_by_one_process_and_said() -> None:
    lines: list[str] = []
    calls = iter(range(100))

    def timer(forward: Any, backward: Any) -> tuple[float, float]:
        if next(calls) == 4:  # the second micro-batch's head
            raise torch.OutOfMemoryError("full")
        return 1.0, 2.0

    bench = LinearBench(tiny(), CPU, torch.float32, timer=timer)
    kinds = bench.kinds()
    found = bench.time(kinds, [10, 20, 30], tell=lines.append)
    assert {name: [sample["tokens"] for sample in samples] for name, samples in found.items()} == {
        "linear": [10],
        "head": [10],
        "embedding": [10],
    }
    assert lines[-1] == "20 tokens do not fit: 10 are the most measured"
    calls = iter([4])
    with pytest.raises(ValueError, match="micro-batch of 10 tokens does not fit one layer of the model on cpu"):
        bench.time(kinds, [10])
    calls = iter(range(100, 200))
    assert len(bench.time(kinds, [10, 20, 30], enough=lambda seconds: True)["linear"]) == 1


def test_every_part_is_made_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And runs on each of them: outputs are as long as it is, and as those of parts made anew."""
    made, outputs = list[Any](), list[torch.Tensor]()
    original = ModelPieces._stage
    monkeypatch.setattr(ModelPieces, "_stage", lambda self, layers: made.append(layers) or original(self, layers))

    def timer(forward: Any, backward: Any) -> tuple[float, float]:
        torch.manual_seed(0)
        outputs.append(forward())
        backward(outputs[-1])
        return 1.0, 2.0

    bench = LinearBench(tiny(), CPU, torch.float32, timer=timer)
    kinds = bench.kinds()
    made.clear()
    bench.time(kinds, [16, 24, 32])
    assert len(made) == 3  # a layer, the head and the embedding
    assert [out.shape[1] for out in outputs if out.ndim == 3] == [16, 16, 24, 24, 32, 32]
    bench.time(kinds, [16])
    assert len(made) == 6


def test_large_micro_batches_are_measured_however_long_models_take_to_be_made() -> None:
    ticks = itertools.count(0, 1000)

    def profile(seconds: float) -> list[int]:
        found = measure_profile(
            tiny(),
            CPU,
            ProfileOptions(seconds=seconds, longest=16_384, held_out=4, dtype=torch.float32),
            timer=lambda forward, backward: (1e-4, 2e-4),
            clock=lambda: float(next(ticks)),
        )
        return [sample["tokens"] for sample in found["linear"]]

    assert profile(60.0) == [1_024, 4_096, 16_384]
    assert profile(1e-3) == [1_024]  # the time that measuring takes is what counts


def test_compiled_layers_are_compiled_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_settings", lambda args: {"backend": "eager", "mode": None, "dynamic": True})

    def timer(forward: Any, backward: Any) -> tuple[float, float]:
        backward(forward())
        return 1.0, 2.0

    before = graphs()
    bench = LinearBench(tiny(), CPU, torch.float32, timer=timer, compiled=True)
    kinds = bench.kinds()
    assert graphs() == before  # nothing is timed yet
    bench.time(kinds, [64])
    first = graphs() - before
    bench.time(kinds, [96])
    second = graphs() - before - first
    assert first > second  # which has new layers, but runs what was compiled for others
    together = graphs()
    bench.time(kinds, [128, 160, 192])
    assert graphs() - together <= second  # layers are made once for all of them
    plain = graphs()
    LinearBench(tiny(), CPU, torch.float32, timer=timer).time(kinds, [64])
    assert graphs() == plain


def test_the_kernel_that_copies_leaves_no_memory_as_it_was() -> None:
    kernel, options = CopyKernel(), AttentionOptions(scaling=1.0)
    q, k, v = torch.randn(5, 4, 6), torch.randn(5, 2, 6), torch.randn(5, 2, 8)
    segments = Segments.from_lengths([5], [5], CPU)
    poisoned = torch.full((5, 4, 8), torch.nan)
    out, lse = kernel.forward(q, k, v, segments, options, poisoned)
    assert out is poisoned and torch.equal(out[..., :6], q) and not out[..., 6:].any() and not lse.any()
    into = tuple(torch.full_like(tensor, torch.nan) for tensor in (q, k, v))
    gradients = kernel.backward(out, q, k, v, out, lse, segments, options, into)
    assert not any(torch.isnan(gradient).any() for gradient in gradients)
    assert kernel.seen == [(4, 2, 6, 8, options)]


def test_forward_and_backward_are_timed_apart() -> None:
    given: list[object] = []
    first, second = forward_backward_seconds(lambda: "out", given.append, device=CPU, repeats=3)
    assert given == ["out"] * 4 and first >= 0 and second >= 0
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        forward_backward_seconds(lambda: None, given.append, device=CPU, repeats=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": 0.0}, "seconds must be above 0, got 0.0"),
        ({"longest": 63}, "longest must be at least 64 tokens, got 63"),
        ({"held_out": 3}, "held_out must be at least 4 shapes, got 3"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProfileOptions(**options)


def test_ranks_that_are_not_there_cannot_share_matrices() -> None:
    with pytest.raises(ValueError, match=r"tp_size=2 does not divide the 1 process that runs; start 2 of them"):
        profile_of(tiny(), ProfileOptions(quick=True, tp_size=2))


def test_the_command_writes_what_policy_reads(tmp_path: Path) -> None:
    file, picture = tmp_path / "profile.json", tmp_path / "rates.png"
    options = ["--quick", "--device", "cpu", "--dtype", "float32", "--json", str(file), "--png", str(picture)]
    result = CliRunner().invoke(app, ["profile", "--model", "tiny", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "attention kernel reference" in result.stdout and "Shapes that are not in the profile" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    workload = load_workload(file)
    assert workload.attention(300) > 0 and workload.linear(300) > 0
    lengths = np.array([300, 200, 40])
    alone = Sharder(ShardingConfig(1, "adaptive"), workload).plan(lengths)
    assert alone.predicted.tolist() == pytest.approx([workload.segment(lengths, lengths).sum() + workload.linear(540)])
    with pytest.raises(ValueError, match="it holds no collectives at all"):  # one process has measured none
        Sharder(ShardingConfig(2, "adaptive"), workload).plan(lengths)
    bad = CliRunner().invoke(app, ["profile", "--model", "tiny", "--quick", "--device", "cpu", "--kernel", "no-such"])
    assert bad.exit_code == 2 and "there is no attention kernel 'no-such'" in " ".join(bad.stderr.split())
