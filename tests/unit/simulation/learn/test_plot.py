"""What a picture of several methods shows is not hidden by its own words."""

import pytest

from clawstream.simulation.learn.plot import curves_figure, people_figure
from clawstream.simulation.learn.report import curves, lasting
from clawstream.simulation.opinions import Control
from tests.unit.simulation.learn.outcomes import REFERENCE, block_row, row


@pytest.mark.slow
def test_the_legend_of_many_curves_crosses_none_of_their_lines() -> None:
    rows = [
        row(0.8, 0.9, method=method, control=control)
        for method in ("combined", "binary", "opd", "topk")
        for control in (None, Control.SHUFFLED, Control.COIN)
    ]
    found = curves(rows)
    figure = curves_figure(found, REFERENCE, "student, demo base", unit="updates")
    figure.canvas.draw()
    [legend] = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == len(found)
    assert not any(axes.get_legend() for axes in figure.axes)
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    from matplotlib import pyplot as plt

    plt.close(figure)


def test_a_picture_of_blocks_has_a_line_a_person_and_says_who_talks_till_when() -> None:
    scores = {10 * n: {"student": 1 - 0.3 * n, "teacher": 0.4, "ta": 0.3 * n} for n in (1, 2, 3)}
    figure = people_figure(lasting([block_row(scores), block_row(scores, control=Control.FROZEN)]), REFERENCE, "blocks")
    figure.canvas.draw()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["student", "teacher", "ta"]
    assert len(figure.axes) == 2
    for axes in figure.axes:
        upright = [x[0] for line in axes.lines if (x := list(line.get_xdata()))[0] == x[-1] and len(x) == 2]
        assert upright == [10, 20, 30]
        assert [text.get_text() for text in axes.texts] == ["student talks", "teacher talks", "ta talks"]
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)
    other = people_figure(lasting([block_row({1: {"student": 1.0}, 5: {"student": 0.5}}, scenario="unrelated")]),
                          REFERENCE, "unrelated")  # fmt: skip
    assert [text.get_text() for text in other.axes[0].texts] == ["student talks", "unrelated"]
    from matplotlib import pyplot as plt

    plt.close(figure)
    plt.close(other)
