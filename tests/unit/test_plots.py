import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from hf_wlb.lengths import length_summary, sample_lengths
from hf_wlb.plots import (
    ShardPanel,
    lengths,
    mean_imbalance,
    octave_shares,
    packer_colours,
    packers,
    plot_frontier,
    plot_length_histogram,
    plot_micro_batch_workloads,
    plot_packer_bars,
    plot_shard_plans,
    sharding,
)
from hf_wlb.plots.sharding import rank_colours, shard_pieces
from hf_wlb.sharding import SHARDED, ShardPlan, per_document, per_sequence

UNEVEN = [[1.0, 3.0, 2.0, 2.0], [4.0, 1.0, 1.0, 2.0]] * 25
EVEN = [[2.0, 2.0, 2.02, 1.98]] * 50
FRONTIER = {
    "steady": [(1.09, 1.02, "spread 1.6"), (0.84, 1.03, "spread 2"), (0.65, 1.05, "spread 3")],
    "wlb": [(0.66, 1.06, "S_max 1.25x"), (0.62, 1.05, "S_max 1.5x")],
    "greedy": [(0.0, 1.41, ""), (0.5, 1.22, "2")],
}


def draw_workloads(path: Path) -> Path:
    return plot_micro_batch_workloads({"next-fit": UNEVEN, "steady": EVEN}, path, title="Work", unit="ms")


def draw_histogram(path: Path) -> Path:
    return plot_length_histogram(length_summary(sample_lengths(2000)), path, context_length=131072)


def draw_frontier(path: Path) -> Path:
    return plot_frontier(FRONTIER, path, "delay (steps)", "time / perfect balance", "What balance costs")


def draw_bars(path: Path) -> Path:
    return plot_packer_bars([("next-fit", 1.44), ("wlb, 2 queues", 1.05), ("steady", 0.999)], path)


DOCUMENTS = [400, 90, 30, 250, 10, 44]
MIXED = ShardPlan(
    np.array(DOCUMENTS), 2, np.array([SHARDED, 0, 0, 1, 0, 1]), np.array([[0, 90, 170, 250, 400]]), "mixed"
)


def panel_of(plan: ShardPlan, *work: float) -> ShardPanel:
    """A panel whose ranks all do the given linear work, local attention, sharded attention and waiting."""
    names = ("linear work", "local attention", "sharded attention", "waiting")
    parts = {name: [amount] * plan.cp_size for name, amount in zip(names, work, strict=True)}
    return ShardPanel(f"{plan.strategy}: cut", f"{sum(work):g} ms", plan, parts)


def draw_shards(path: Path) -> Path:
    panels = [
        panel_of(per_sequence(DOCUMENTS, 2), 10, 1, 6, 3),
        panel_of(per_document(DOCUMENTS, 2), 10, 0, 5, 4),
        panel_of(MIXED, 10, 3, 2, 0),
    ]
    return plot_shard_plans(panels, path, ideal=14.0, unit="ms")


DRAWINGS = (draw_workloads, draw_histogram, draw_frontier, draw_bars, draw_shards)


def text_of(figure: Any) -> str:
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures as they are saved."""
    figures: list[Any] = []
    for module in (lengths, packers, sharding):
        save = module.save
        monkeypatch.setattr(
            module, "save", lambda figure, path, save=save: figures.append(figure) or save(figure, path)
        )
    return figures


@pytest.mark.parametrize("draw", DRAWINGS)
def test_pictures_are_small_filled_and_the_same_each_time(tmp_path: Path, draw: Any) -> None:
    path = draw(tmp_path / "new folder" / "a.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 150_000
    pixels = imread(path)[..., :3]
    assert 0.01 < (pixels.min(axis=2) < 0.95).mean() < 0.6
    assert draw(tmp_path / "b.png").read_bytes() == content


def test_workload_panels_say_their_imbalance(tmp_path: Path, drawn: list[Any]) -> None:
    draw_workloads(tmp_path / "a.png")
    text = text_of(drawn[0])
    assert "next-fit: imbalance 1.75 (heaviest / mean)" in text  # the mean of 3 / 2 and 4 / 2
    assert "steady: imbalance 1.01" in text
    assert "step (the first 32 of 50 are shown)" in text
    assert "work (ms)" in text
    assert len({axes.get_ylim() for axes in drawn[0].axes}) == 1


def test_imbalance_by_hand() -> None:
    assert mean_imbalance([[1.0, 1.0]]) == 1.0
    assert mean_imbalance([[1.0, 3.0], [0.0, 5.0]]) == 1.75


def test_a_packer_has_one_colour_everywhere() -> None:
    names = ["steady", "wlb", "wlb, 2 queues", "next_fit", "next-fit", "concat_and_cut", "greedy, 8", "solver"]
    colours = packer_colours(names)
    assert colours["wlb"] == colours["wlb, 2 queues"]
    assert colours["next_fit"] == colours["next-fit"]
    assert len(set(colours.values())) == 6
    others = packer_colours(["mine", "steady", "yours"])
    assert others["steady"] == colours["steady"]
    assert len({*others.values(), *colours.values()}) == 8


def test_octave_shares_by_hand() -> None:
    edges, shares = octave_shares(length_summary(np.array([2, 3, 3, 9])).histogram)
    assert edges == [2, 4, 8, 16]
    assert shares == pytest.approx(
        np.array([[75, 0, 25], [800 / 17, 0, 900 / 17], [1500 / 60, 0, 4500 / 60]]), rel=1e-9
    )


def test_the_shortest_hundredth_shares_a_bin() -> None:
    edges, shares = octave_shares(length_summary(np.array([1, *[100] * 199])).histogram)
    assert edges == [1, 64, 128]
    assert shares[0] == pytest.approx([0.5, 99.5])
    edges, shares = octave_shares(length_summary(sample_lengths(20_000)).histogram)
    assert edges[0] == 1
    assert (np.diff(np.log2(edges[1:])) == 1).all()
    assert shares.sum(axis=1) == pytest.approx([100.0] * 3)
    assert shares[2, -1] > 50 > 1 > shares[0, -1]  # the few longest documents are most of the attention


def test_one_length_only(tmp_path: Path) -> None:
    for same in ([7, 7], [1], [0, 4]):
        plot_length_histogram(length_summary(np.array(same)), tmp_path / "a.png", context_length=4)


def test_frontier_labels_do_not_cover_one_another(tmp_path: Path, drawn: list[Any]) -> None:
    draw_frontier(tmp_path / "a.png")
    renderer = drawn[0].canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in drawn[0].axes[0].texts]
    assert len(boxes) == 6
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_bars_start_at_perfect_balance(tmp_path: Path, drawn: list[Any]) -> None:
    draw_bars(tmp_path / "a.png")
    widths = [bar.get_width() for bar in drawn[0].axes[0].patches]
    assert widths == pytest.approx([44.0, 5.0, -0.1])
    assert "1.440 x" in text_of(drawn[0])


def test_shards_have_a_row_for_every_rank_and_one_scale(tmp_path: Path, drawn: list[Any]) -> None:
    draw_shards(tmp_path / "a.png")
    left, right = drawn[0].axes[0::2], drawn[0].axes[1::2]
    assert len(left) == len(right) == 3
    for axes in left:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
        assert axes.get_xlim() == (0, sum(DOCUMENTS))
    assert len({axes.get_xlim() for axes in right}) == 1
    assert [text.get_text() for axes in right for text in axes.texts] == ["20", "19", "15"]  # of the slowest rank
    text = text_of(drawn[0])
    assert "per_sequence: cut" in text and "20 ms" in text and "predicted work (ms)" in text
    assert "chunks of documents that were cut" in text and "ideal: shared out evenly" in text


def test_bars_of_work_follow_one_another(tmp_path: Path, drawn: list[Any]) -> None:
    plot_shard_plans([panel_of(MIXED, 10, 3, 2, 1)], tmp_path / "a.png", ideal=14.0, unit="ms")
    bars = [bar for bar in drawn[0].axes[1].patches if round(bar.get_y() + 0.36) == 1]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 10), (10, 3), (13, 2), (15, 1)]
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True, False]


def test_pieces_tile_the_micro_batch() -> None:
    for plan in (per_sequence(DOCUMENTS, 3), per_document(DOCUMENTS, 4), MIXED):
        pieces = sorted(shard_pieces(plan), key=lambda piece: piece[1])
        ends = np.cumsum([tokens for _, _, tokens, _ in pieces])
        assert [first for _, first, _, _ in pieces] == [0, *ends[:-1]] and ends[-1] == sum(DOCUMENTS)
        held = np.bincount([rank for rank, *_ in pieces], [tokens for _, _, tokens, _ in pieces], plan.cp_size)
        assert held.tolist() == plan.tokens.tolist()
        assert sum(local for *_, local in pieces) == (plan.owner != SHARDED).sum()
    assert list(shard_pieces(MIXED))[:5] == [
        (0, 0, 90, False),
        (1, 90, 80, False),
        (1, 170, 80, False),
        (0, 250, 150, False),
        (0, 400, 90, True),
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 8, 9, 32])
def test_ranks_have_colours_of_their_own(tmp_path: Path, cp_size: int) -> None:
    assert len(set(rank_colours(cp_size))) == cp_size
    plan = per_document([2000, 3, *[1] * 160], cp_size)  # more documents than lines are drawn for
    path = plot_shard_plans([panel_of(plan, 1, 0, 1, 0)], tmp_path / "a.png", ideal=0.0, unit="ms")
    assert imread(path)[..., :3].min() < 0.5


def test_nothing_to_draw_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with pytest.raises(ValueError, match="give at least one packer's steps"):
        plot_micro_batch_workloads({}, path)
    for steps in ([], [[]], [[0.0, 0.0]]):
        with pytest.raises(ValueError, match="steady has no steps, or a step without work"):
            plot_micro_batch_workloads({"steady": steps}, path)
    with pytest.raises(ValueError, match="max_steps=0"):
        plot_micro_batch_workloads({"steady": EVEN}, path, max_steps=0)
    with pytest.raises(ValueError, match="no lengths to draw"):
        plot_length_histogram(length_summary(np.array([0, 0])), path)
    with pytest.raises(ValueError, match="no points to draw"):
        plot_frontier({"steady": []}, path, "x", "y", "title")
    with pytest.raises(ValueError, match="no packers to draw"):
        plot_packer_bars([], path)
    with pytest.raises(ValueError, match="time of 'steady' over perfect balance is nan"):
        plot_packer_bars([("steady", float("nan"))], path)
    with pytest.raises(ValueError, match="no shards to draw"):
        plot_shard_plans([], path, ideal=1.0, unit="ms")
    for other in (per_document(DOCUMENTS, 3), per_document(DOCUMENTS[::-1], 2)):
        with pytest.raises(ValueError, match="Plans of different documents or numbers of ranks"):
            plot_shard_plans([panel_of(MIXED, 1, 1, 1, 1), panel_of(other, 1, 1, 1, 1)], path, ideal=1.0, unit="ms")
    assert not path.exists()


def test_no_global_matplotlib_state_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib\n"
        "settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings()\n"
        "from hf_wlb import plots\n"
        "plots.plot_packer_bars([('steady', 1.1)], sys.argv[1])\n"
        "assert settings() == before\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True)
