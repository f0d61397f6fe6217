"""The pictures that the notebooks show: of micro-batches, steps, masks, maps, lines, spreads and waits."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from hf_wlb.packing import ArraySource, MicroBatch, PackingConfig, StepPlanner, WatchedStep, watch
from hf_wlb.plots import (
    LinePanel,
    MapPanel,
    documents,
    inline,
    lines,
    maps,
    mask_ranks,
    masks,
    pairs_by_rank,
    plot_lines,
    plot_maps,
    plot_masks,
    plot_micro_batch_documents,
    plot_packer_bars,
    plot_spread,
    plot_steps,
    plot_waits,
    shades_of,
    spread,
    steps,
    waits,
)
from hf_wlb.plots.masks import NOBODY
from hf_wlb.sharding import SHARDED, ShardPlan, per_document, per_sequence
from hf_wlb.workload import AnalyticWorkload
from tests.unit.test_plots import text_of

WORKLOAD = AnalyticWorkload.from_crossover(8)
CONFIG = PackingConfig(32, micro_batches_per_replica=4, pp_size=2, max_document_tokens=32)
STREAM = np.array([13, 16, 4, 5, 19, 3, 6, 12, 2, 5, 30, 4, 14, 29, 6, 3, 20, 28, 5, 30, 6, 2, 4, 4, 3, 21] * 6)
THRESHOLDS = (10, 20)
LENGTHS = [400, 90, 30, 250, 10, 44]
MIXED = ShardPlan(np.array(LENGTHS), 2, np.array([SHARDED, 0, 0, 1, 0, 1]), np.array([[0, 90, 170, 250, 400]]), "mixed")
PLANS = {"per_sequence": per_sequence(LENGTHS, 2), "per_document": per_document(LENGTHS, 2), "mixed": MIXED}


def watched(packer: str, count: int = 4) -> tuple[PackingConfig, list[WatchedStep]]:
    config = replace(CONFIG, packer=packer, thresholds=THRESHOLDS if packer == "wlb" else None)
    return config, watch(StepPlanner(ArraySource(STREAM), WORKLOAD, config), count)


def draw_documents(path: Path) -> Path:
    plan = watched("next-fit")[1][1].plan
    shown = list(plan.micro_batches)
    return plot_micro_batch_documents(shown, path, workload=WORKLOAD, thresholds=THRESHOLDS, title="Work")


def draw_film(path: Path, packer: str = "wlb", count: int = 4) -> Path:
    config, shown = watched(packer, count)
    return plot_steps(shown, path, config=config, thresholds=THRESHOLDS, title="Film", unit="K")


def draw_masks(path: Path) -> Path:
    return plot_masks(PLANS, path, title="Masks")


def draw_maps(path: Path) -> Path:
    gains = [[1.0, 1.2], [1.5, 2.0], [1.1, 1.9]]
    panels = [
        MapPanel("gain", [[f"{gain:.1f}x" for gain in row] for row in gains], shades_of(gains, 1, 2)),
        MapPanel("who", [["a", "b"]] * 3, [[1.0, 1.0]] * 3, [["#D55E00", "#0072B2"]] * 3),
    ]
    return plot_maps(panels, path, rows="123", columns=["x", "y"], ylabel="rows", xlabel="columns", title="Map")


def draw_lines(path: Path) -> Path:
    points = [(1.0, 5.0), (2.0, 2.0), (4.0, 1.0)]
    panels = [
        LinePanel({"wlb": points, "steady": [(4.0, 1.02), (1.0, 3.0)]}, "x", "y", dots={"wlb": points}),
        LinePanel(
            {"up": [(128, 1), (4096, 9)]}, "tokens", "", name_at={"up": 1024}, marks={"here": 512}, x_scale="tokens"
        ),
        LinePanel({"share": points}, "%", "", notes={"note": (2.0, 2.0)}, x_scale="percent", steps=True),
    ]
    return plot_lines(panels, path, title="Lines")


def draw_spread(path: Path) -> Path:
    panels = {"4 ranks": {"a": [0.5, 0.7, 0.6], "b": [0.9, 1.0]}, "8 ranks": {"a": [0.4], "b": [0.8]}}
    return plot_spread(panels, path, colours={"a": "#D55E00", "b": "#009E73"}, xlabel="share", title="Spread")


def draw_waits(path: Path) -> Path:
    return plot_waits({"wlb": [80, 10, 10], "steady": [90, 0, 0, 10]}, path, title="Waits")


DRAWINGS = (draw_documents, draw_film, draw_masks, draw_maps, draw_lines, draw_spread, draw_waits)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures as they are saved."""
    figures: list[Any] = []
    for module in (documents, steps, masks, maps, lines, spread, waits):
        save = module.save
        monkeypatch.setattr(
            module, "save", lambda figure, path, save=save: figures.append(figure) or save(figure, path)
        )
    return figures


def boxes(axes: Any) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_width()) for bar in axes.patches if isinstance(bar, Rectangle)]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_pictures_are_small_filled_and_the_same_each_time(tmp_path: Path, draw: Any) -> None:
    content = draw(tmp_path / "new folder" / "a.png").read_bytes()
    pixels = imread(io.BytesIO(content))[..., :3]
    assert len(content) < 150_000 and 0.01 < (pixels.min(axis=2) < 0.95).mean() < 0.8
    assert draw(tmp_path / "b.png").read_bytes() == content


def test_a_picture_in_a_notebook_is_smaller_and_shows_itself() -> None:
    rows = [("next-fit", 1.44), ("steady", 1.01)]
    picture = inline(plot_packer_bars, rows, title="Steady is faster")
    assert picture._repr_png_() == picture.png and picture.png.startswith(b"\x89PNG")
    assert imread(io.BytesIO(picture.png)).shape[:2] == (picture.height, picture.width)
    assert picture == inline(plot_packer_bars, rows, title="Steady is faster")
    assert picture != inline(plot_packer_bars, rows, title="Another")
    assert repr(picture) == f"Picture(width={picture.width}, height={picture.height})"
    with pytest.raises(ValueError, match="no packers to draw"):
        inline(plot_packer_bars, [])


def test_a_picture_in_a_notebook_has_the_files_colours(tmp_path: Path) -> None:
    whole = imread(draw_masks(tmp_path / "a.png"))[..., :3]
    picture = inline(plot_masks, PLANS, title="Masks")
    small = imread(io.BytesIO(picture.png))[..., :3]
    assert len(picture.png) < 0.6 * (tmp_path / "a.png").stat().st_size
    assert np.abs(whole - small).mean() < 0.01
    assert np.quantile(np.abs(whole - small), 0.999) < 0.15


def test_micro_batches_show_their_tokens_and_work(tmp_path: Path, drawn: list[Any]) -> None:
    draw_documents(tmp_path / "a.png")
    shown = list(watched("next-fit")[1][1].plan.micro_batches)
    left, right = drawn[0].axes
    lengths = [document.length for document in shown[0].documents]
    assert boxes(left)[: len(lengths)] == [(sum(lengths[:k]), length) for k, length in enumerate(lengths)]
    mean = np.mean([m.workload for m in shown])
    ends = [text.get_text() for text in right.texts]
    assert ends == [f"{m.workload / mean:.2f}" for m in shown]
    assert [text.get_fontweight() for text in right.texts].count("bold") == 1
    assert "from 10 tokens" in text_of(drawn[0]) and "from 20 tokens" in text_of(drawn[0])


def test_micro_batches_may_be_empty(tmp_path: Path) -> None:
    full = list(watched("next-fit")[1][0].plan.micro_batches)
    plot_micro_batch_documents(
        [*full, MicroBatch.of([])], tmp_path / "a.png", workload=WORKLOAD, thresholds=THRESHOLDS, title=""
    )


def test_film_shows_steps_queues_and_waits(tmp_path: Path, drawn: list[Any]) -> None:
    draw_film(tmp_path / "a.png")
    config, shown = watched("wlb")
    assert len(drawn[0].axes) == len(shown)
    for axes, step in zip(drawn[0].axes, shown, strict=True):
        assert axes.get_title(loc="left") == (
            f"step {step.plan.step + 1}: {step.plan.tokens}K, imbalance {step.figures['imbalance']:.2f}"
        )
        written = [text.get_text() for text in axes.texts]
        for document in step.plan.documents:
            wait = step.plan.step - document.arrived
            assert document.length < THRESHOLDS[0] or f"{document.length}{f' ({wait})' if wait else ''}" in written
        outlines = [patch for patch in axes.patches if patch.get_facecolor()[3] == 0]
        assert len(outlines) == 2 * config.micro_batches  # places of two levels
        edges = [patch.get_edgecolor() for patch in axes.patches]
        dark = sum(max(edge[:3]) < 0.2 and edge[3] == 1 for edge in edges)
        waiting = [d for queue in step.queues for d in queue]
        assert dark == sum(d.arrived < step.plan.step for d in [*step.plan.documents, *waiting])
    assert any("(1)" in text.get_text() for axes in drawn[0].axes for text in axes.texts)


def test_film_of_other_packers(tmp_path: Path, drawn: list[Any]) -> None:
    for packer, count in (("steady", 9), ("next-fit", 1), ("greedy", 2)):
        draw_film(tmp_path / "a.png", packer, count)
    steady, plain, _ = (text_of(figure) for figure in drawn)
    assert "waiting:" in steady and "S_max" in steady
    assert "waiting:" not in plain and "S_max" not in plain and "waited" not in plain


def test_left_over_documents_are_counted(tmp_path: Path, drawn: list[Any]) -> None:
    config, shown = watched("wlb", 40)
    late = [step for step in shown if step.left_over]
    assert late, "this stream overflows Algorithm 1 now and then"
    plot_steps(late[:1], tmp_path / "a.png", config=config, thresholds=THRESHOLDS, title="")
    assert f"waiting, and {len(late[0].left_over)} that found no room:" in text_of(drawn[0])


def dense_mask(plan: ShardPlan) -> np.ndarray:
    """Rank of every score, token by token, from the plan's own terms."""
    total = int(plan.lengths.sum())
    mask = np.full((total, total), NOBODY)
    start, cut = 0, 0
    for length, owner in zip(plan.lengths.tolist(), plan.owner.tolist(), strict=True):
        for query in range(length):
            rank = owner
            if owner == SHARDED:
                chunk = int(np.searchsorted(plan.edges[cut], query, side="right")) - 1
                rank = min(chunk, 2 * plan.cp_size - 1 - chunk)
            mask[start + query, start : start + query + 1] = rank
        cut += owner == SHARDED
        start += length
    return mask


@pytest.mark.parametrize("name", PLANS)
def test_masks_are_those_of_the_plan(name: str) -> None:
    plan, dense = PLANS[name], dense_mask(PLANS[name])
    assert (mask_ranks(plan, len(dense)) == dense).all()
    assert pairs_by_rank(plan).tolist() == [(dense == rank).sum() for rank in range(plan.cp_size)]
    coarse = mask_ranks(plan, 103)
    places = ((np.arange(103) + 0.5) * len(dense) / 103).astype(int)
    assert (coarse == dense[np.ix_(places, places)]).all()


def test_control_another_plan_has_another_mask() -> None:
    dense = dense_mask(PLANS["per_sequence"])
    assert (mask_ranks(PLANS["per_document"], len(dense)) != dense).any()


def test_masks_say_who_computes_how_much(tmp_path: Path, drawn: list[Any]) -> None:
    draw_masks(tmp_path / "a.png")
    squares, bars = drawn[0].axes[0::2], drawn[0].axes[1::2]
    assert [axes.get_title() for axes in squares] == list(PLANS)
    for axes, plan in zip(bars, PLANS.values(), strict=True):
        pairs = pairs_by_rank(plan)
        assert [text.get_text() for text in axes.texts] == [f"{share:.2f}" for share in pairs / pairs.mean()]
    assert len({axes.get_xlim() for axes in bars}) == 1


def test_cells_of_a_map_are_as_deep_as_told(tmp_path: Path, drawn: list[Any]) -> None:
    draw_maps(tmp_path / "a.png")
    left, right = drawn[0].axes
    depth = 1 - left.images[0].get_array().mean(axis=2)
    assert np.argsort(depth.ravel()).tolist() == np.argsort([1.0, 1.2, 1.5, 2.0, 1.1, 1.9]).tolist()
    assert [text.get_color() for text in left.texts][3] == "white"
    assert [label.get_text() for label in left.get_yticklabels()] == ["1", "2", "3"]
    assert (right.images[0].get_array()[:, 0] != right.images[0].get_array()[:, 1]).any()


def test_lines_are_named_where_they_end_or_where_told(tmp_path: Path, drawn: list[Any]) -> None:
    draw_lines(tmp_path / "a.png")
    first, second, third = drawn[0].axes
    renderer = drawn[0].canvas.get_renderer()
    names = {text.get_text(): text for text in first.texts}
    assert set(names) == {"wlb", "steady"} and names["wlb"].xy == (4.0, 1.0)
    assert not names["wlb"].get_window_extent(renderer).overlaps(names["steady"].get_window_extent(renderer))
    assert {text.get_text() for text in second.texts} == {"up", "here"}
    assert [text.get_ha() for text in second.texts if text.get_text() == "up"] == ["right"]  # the line rises there
    assert "note" in {text.get_text() for text in third.texts}
    assert [second.xaxis.get_major_formatter()(tokens) for tokens in (512, 4096)] == ["512", "4K"]


def test_spreads_show_every_value_and_the_mean(tmp_path: Path, drawn: list[Any]) -> None:
    draw_spread(tmp_path / "a.png")
    left, right = drawn[0].axes
    assert sorted(left.collections[0].get_offsets()[:, 0]) == pytest.approx([0.5, 0.6, 0.7])
    assert [text.get_text() for text in left.texts] == ["0.60", "0.95"]
    assert [text.get_text() for text in right.texts] == ["0.40", "0.80"]
    heights = left.collections[0].get_offsets()[:, 1]
    assert len(set(heights)) == 3 and np.abs(heights).max() < 0.5


def test_waits_leave_out_what_did_not_wait(tmp_path: Path, drawn: list[Any]) -> None:
    draw_waits(tmp_path / "a.png")
    wlb, steady = drawn[0].axes
    assert [bar.get_height() for bar in wlb.patches] == pytest.approx([10.0, 10.0])
    assert wlb.get_title() == "wlb: 80% leave at once, mean wait 0.30 steps"
    assert steady.get_title() == "steady: 90% leave at once, mean wait 0.30 steps"
    assert wlb.get_ylim() == steady.get_ylim() and wlb.get_xlim() == steady.get_xlim()


def test_nothing_to_draw_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    config, shown = watched("wlb")
    with pytest.raises(ValueError, match="no documents to draw"):
        plot_micro_batch_documents([MicroBatch.of([])], path, workload=WORKLOAD, thresholds=THRESHOLDS, title="")
    with pytest.raises(ValueError, match="two lengths, ascending"):
        packed = list(shown[0].plan.micro_batches)
        plot_micro_batch_documents(packed, path, workload=WORKLOAD, thresholds=(20, 10), title="")
    with pytest.raises(ValueError, match="no steps to draw"):
        plot_steps([], path, config=config, thresholds=THRESHOLDS, title="")
    with pytest.raises(ValueError, match="no masks to draw"):
        plot_masks({}, path, title="")
    with pytest.raises(ValueError, match="Plans of different documents"):
        plot_masks({"a": MIXED, "b": per_document(LENGTHS, 3)}, path, title="")
    names: Any = {"rows": ["1"], "columns": ["x"], "ylabel": "", "xlabel": "", "title": ""}
    with pytest.raises(ValueError, match="no map to draw"):
        plot_maps([], path, **names)
    with pytest.raises(ValueError, match="needs 1 rows of 1 cells"):
        plot_maps([MapPanel("p", [["a", "b"]], [[0.0]])], path, **names)
    with pytest.raises(ValueError, match="within 0 to 1"):
        plot_maps([MapPanel("p", [["a"]], [[1.5]])], path, **names)
    for panels in ([], [LinePanel({"a": []}, "", "")]):
        with pytest.raises(ValueError, match="no lines to draw"):
            plot_lines(panels, path, title="")
    with pytest.raises(ValueError, match="x_scale must be linear, tokens or percent"):
        plot_lines([LinePanel({"a": [(1, 1)]}, "", "", x_scale="log")], path, title="")
    with pytest.raises(ValueError, match="no values to draw"):
        plot_spread({}, path, colours={}, xlabel="", title="")
    with pytest.raises(ValueError, match="needs values for each of a"):
        plot_spread({"p": {"a": []}}, path, colours={"a": "red"}, xlabel="", title="")
    with pytest.raises(ValueError, match="no colour for a"):
        plot_spread({"p": {"a": [1.0]}}, path, colours={}, xlabel="", title="")
    for tokens in ({}, {"wlb": [0]}):
        with pytest.raises(ValueError, match="nothing to draw"):
            plot_waits(tokens, path, title="")
    assert not path.exists()
