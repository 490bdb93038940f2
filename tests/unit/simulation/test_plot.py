"""What a picture of several methods shows is not hidden by its own words."""

from clawstream.simulation.learn.controls import Control
from clawstream.simulation.learn.plot import curves_figure
from clawstream.simulation.learn.report import curves
from tests.unit.simulation.outcomes import REFERENCE, row


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
