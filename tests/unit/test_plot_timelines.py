"""The picture of pipelines: what is drawn where, in which colour, and what is written on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.text import Text

from hf_wlb.plots import plot_timelines, timeline
from hf_wlb.simulator.schedules import ScheduleConfig
from hf_wlb.simulator.timeline import OpTimes, run_schedule

PLAIN = ScheduleConfig()
INTERLEAVED = ScheduleConfig("interleaved", model_chunks=2)
CUT = ScheduleConfig("seq1f1b", pieces=2)
UNEVEN = (1.0, 2.0, 0.5, 1.5)


def run(config=PLAIN, pp_size=2, seconds=UNEVEN, scale=1.0):
    shape = (pp_size * config.model_chunks, len(seconds), config.pieces)
    forward = np.broadcast_to(np.reshape(seconds, (1, -1, 1)), shape) * scale
    return run_schedule(config, pp_size, OpTimes(forward, 2 * forward, np.zeros(shape[1:])))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures as they are saved."""
    found: list[Any] = []
    save = timeline.save
    monkeypatch.setattr(timeline, "save", lambda figure, path: found.append(figure) or save(figure, path))
    return found


def words(figure):
    return "\n".join(each.get_text() for each in figure.findobj(Text))


def bars(axes):
    """Begin, end and stage of every bar."""
    return [
        (*path.get_extents().intervalx, path.get_extents().intervaly.mean())
        for collection in axes.collections
        if isinstance(collection, PolyCollection)
        for path in collection.get_paths()
    ]


def test_pictures_are_small_filled_and_the_same_each_time(tmp_path):
    named = {"1F1B": run(), "interleaved": run(INTERLEAVED), "cut": run(CUT, 4)}
    path = plot_timelines(named, tmp_path / "new folder" / "a.png", "Three schedules")
    assert path.read_bytes() == plot_timelines(named, tmp_path / "b.png", "Three schedules").read_bytes()
    assert len(path.read_bytes()) < 150_000
    pixels = imread(path)[..., :3]
    assert 0.1 < (pixels.min(axis=2) < 0.9).mean() < 0.7


def test_every_bar_lies_where_its_span_does_on_one_scale(tmp_path, figures):
    named = {"slow": run(scale=2.0), "quick": run(), "chunks": run(INTERLEAVED)}
    plot_timelines(named, tmp_path / "a.png")
    axes = figures[0].axes
    assert len({each.get_xlim() for each in axes}) == 1 and axes[0].get_xlim()[1] >= named["slow"].seconds
    for each, drawn in zip(axes, named.values(), strict=True):
        spans = [(span.begin, span.end, span.stage) for row in drawn.spans for span in row]
        assert bars(each) == [pytest.approx(span) for span in spans]
        waiting = [patch for patch in each.patches if patch.get_width() == pytest.approx(drawn.seconds)]
        assert len(waiting) == drawn.pp_size
        assert [label.get_text() for label in each.get_yticklabels()] == ["stage 0", "stage 1"]
        assert each.get_ylim() == (1.5, -0.5)


def test_forwards_are_lighter_and_chunks_have_colours_of_their_own(tmp_path, figures):
    drawn = run(INTERLEAVED)
    plot_timelines({"plain": run(), "chunks": drawn}, tmp_path / "a.png")
    colours = {}
    for row, collection in zip(drawn.spans, figures[0].axes[1].collections, strict=True):
        for span, colour in zip(row, collection.get_facecolors(), strict=True):
            colours.setdefault((span.op.chunk, span.op.forward), set()).add(to_hex(colour))
    assert [len(found) for found in colours.values()] == [1] * 4 and len(set.union(*colours.values())) == 4
    light = {key: sum(bytes.fromhex(found.pop()[1:])) for key, found in colours.items()}
    assert all(light[chunk, True] > light[chunk, False] for chunk in (0, 1))
    assert "model chunk 1" in words(figures[0])


def test_it_says_how_long_and_how_busy(tmp_path, figures):
    drawn = run()
    busy = sum(drawn.busy) / 2
    plot_timelines({"steady": drawn}, tmp_path / "a.png", "Much waiting")
    plot_timelines({"steady": run(scale=0.01)}, tmp_path / "b.png")
    for figure, time, unit in zip(
        figures, (f"{drawn.seconds:.2f} s", f"{drawn.seconds * 10:.3g} ms"), "sm", strict=True
    ):
        assert f"steady: {time}, stages busy {busy:.0%} of the time" in words(figure)
        assert figure.axes[0].get_xlabel().startswith({"s": "seconds (numbers", "m": "milliseconds (numbers"}[unit])
        assert all(each in words(figure) for each in ("forward", "backward", "waiting"))
        assert "model chunk" not in words(figure)
    assert "Much waiting" in words(figures[0])
    assert figures[1].axes[0].get_xlim()[1] == pytest.approx(drawn.seconds * 10, rel=0.01)


def test_numbers_stand_in_bars_that_hold_them(tmp_path, figures):
    plot_timelines({"steady": run()}, tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert sorted(each.get_text() for each in axes.texts) == sorted("01230123" * 2)
    renderer = figures[0].canvas.get_renderer()
    extents = sorted(bars(axes))
    for each in axes.texts:
        box = each.get_window_extent(renderer).transformed(axes.transData.inverted())
        assert any(begin <= box.x0 and box.x1 <= end and abs(stage - box.y0) < 0.5 for begin, end, stage in extents)


def test_numbers_name_pieces_and_fall_away_where_most_do_not_fit(tmp_path, figures):
    plot_timelines({"cut": run(CUT)}, tmp_path / "a.png")
    assert {"3.1", "0.0"} <= {each.get_text() for each in figures[0].axes[0].texts}
    assert figures[0].axes[0].get_xlabel() == "seconds (numbers: micro-batches, and their pieces)"
    plot_timelines({"many": run(seconds=[*[1.0] * 200, 30.0])}, tmp_path / "b.png")
    assert not figures[1].axes[0].texts and figures[1].axes[0].get_xlabel() == "seconds"
    assert len(bars(figures[1].axes[0])) == 2 * 2 * 201


def test_many_stages_are_named_in_part(tmp_path, figures):
    plot_timelines({"wide": run(pp_size=64, seconds=[1.0] * 8), "one": run(pp_size=1)}, tmp_path / "a.png")
    names = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert names[:2] == ["stage 0", "stage 4"] and len(names) == 16
    assert [label.get_text() for label in figures[0].axes[1].get_yticklabels()] == ["stage 0"]
    boxes = [label.get_window_extent() for label in figures[0].axes[0].get_yticklabels()]
    assert not any(one.overlaps(two) for one, two in zip(boxes[1:], boxes[:-1], strict=True))


def test_nothing_to_draw_gets_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no timelines to draw: give at least one"):
        plot_timelines({}, tmp_path / "a.png")
    for empty in (run(seconds=[]), run(scale=0.0)):
        with pytest.raises(ValueError, match="None of the timelines takes any time"):
            plot_timelines({"empty": empty}, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    plot_timelines({"empty": run(seconds=[]), "full": run()}, tmp_path / "a.png")
