"""The picture of what amounts are made of."""

import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from hf_wlb.plots import plot_stacks, stacks

COLOURS = {"work": "#005500", "waiting": "#C9C9C9", "end": "#7B52AB"}
BARS = {
    "plain": {"work": 10.0, "waiting": 20.0, "end": 0.5},
    "balanced": {"work": 10.0, "waiting": 3.0, "end": 0.0},
}


def draw(path: Path, **more: Any) -> Path:
    given = {"colours": COLOURS, "xlabel": "seconds", "title": "Stacks", "notes": {"balanced": "2.35x"}, **more}
    return plot_stacks(given.pop("bars", BARS), path, **given)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures as they are saved."""
    figures: list[Any] = []
    save = stacks.save
    monkeypatch.setattr(stacks, "save", lambda figure, path: figures.append(figure) or save(figure, path))
    return figures


def test_the_picture_is_small_filled_and_the_same_each_time(tmp_path: Path) -> None:
    content = draw(tmp_path / "new folder" / "a.png").read_bytes()
    pixels = imread(io.BytesIO(content))[..., :3]
    assert len(content) < 150_000 and 0.01 < (pixels.min(axis=2) < 0.95).mean() < 0.8
    assert draw(tmp_path / "b.png").read_bytes() == content


def test_parts_follow_one_another_and_bars_say_their_sum(tmp_path: Path, drawn: list[Any]) -> None:
    draw(tmp_path / "a.png")
    (axes,) = drawn[0].axes
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches]
    expected = [(0, 10, 0), (10, 20, 0), (30, 0.5, 0), (0, 10, 1), (10, 3, 1), (13, 0, 1)]
    assert [value for bar in bars for value in bar] == pytest.approx([value for bar in expected for value in bar])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain", "balanced"]
    assert axes.yaxis_inverted() and axes.get_xlim()[1] > 30.5
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["10.0", "20.0", "30.5", "10.0", "3.0", "13.0", "2.35x"]  # parts that are too narrow have none
    inks = [text.get_color() for text in axes.texts]
    assert inks[0] == "white" and inks[1] != "white"


def test_nothing_written_behind_a_bar_overlaps(tmp_path: Path, drawn: list[Any]) -> None:
    notes = {"plain": "1.00x  36 GB", "balanced": "2.35x  41 GB"}
    for text in ("{:.1f}", "{:,.3f} s"):
        draw(tmp_path / "a.png", notes=notes, text=text)
        (axes,) = drawn[-1].axes
        renderer = drawn[-1].canvas.get_renderer()
        boxes = {written.get_text(): written.get_window_extent(renderer) for written in axes.texts}
        for total, note in zip((30.5, 13.0), notes.values(), strict=True):
            assert boxes[note].x0 - boxes[text.format(total)].x1 > 2
            assert boxes[note].x1 < drawn[-1].bbox.x1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bars": {}}, "no bars to draw"),
        ({"bars": {"plain": {}}}, "no bars to draw"),
        ({"bars": {"plain": {"work": 0.0}}}, "no bars to draw"),
        ({"bars": {"plain": {"work": 2.0, "end": -1.0}}}, "'plain' needs amounts of at least 0 for work, end"),
        ({"bars": {"plain": {"work": 2.0}, "other": {"end": 1.0}}}, "'other' needs amounts of at least 0 for work"),
        ({"colours": {"work": "red"}}, "no colour for waiting, end"),
        ({"notes": {"nobody": "x"}}, "no bar for nobody"),
    ],
)
def test_what_cannot_be_drawn_gets_a_sentence(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "a.png", **{"notes": {}, **given})
    assert not (tmp_path / "a.png").exists()
