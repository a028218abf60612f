"""Plots draw what they are given, into the axes they are given, and leave matplotlib's settings alone."""

import math

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from dissensus import metrics, plots
from dissensus.diagnostics import Check, DropCurve, Pair
from dissensus.predictions import mixture
from dissensus.training.history import History


def history_of(losses):
    """A history with one row of losses, one a member, for every check."""
    history = History()
    for check, row in enumerate(losses, start=1):
        whole = {"ensemble_loss": float(check)}
        history.add({"epoch": check, "step": 10 * check}, list(range(len(row))), {"loss": row}, whole)
    return history


def single(draw):
    figure, (ax,) = plots.panels()
    draw(ax)
    return figure


def plane(draw):
    probs = torch.full((4, 4, 3), 1 / 3)
    return draw(
        torch.rand(10, 2), torch.arange(10) % 3, torch.linspace(-1, 1, 4), probs, torch.rand(4, 4), torch.rand(4, 4)
    )


CURVE = metrics.reliability_curve(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]))
DRAWINGS = {
    "bands": lambda: single(lambda ax: plots.bands([0, 1], [0, 1], [1, 1], ax, truth=[0, 1], points=([0], [1]))),
    "member_bands": lambda: plots.member_bands([0, 1], torch.zeros(3, 2), torch.ones(3, 2)),
    "four_panels": lambda: plane(plots.four_panels),
    "class_maps": lambda: plots.class_maps([0, 1], torch.full((2, 2, 2, 3), 1 / 3), ["a", "b"]),
    "class_points": lambda: single(lambda ax: plots.class_points(torch.rand(4, 2), [0, 0, 1, 2], ax)),
    "reliability": lambda: single(lambda ax: plots.reliability(CURVE, ax)),
    "score_histograms": lambda: single(lambda ax: plots.score_histograms({"id": [0.1, 0.3], "ood": [0.5]}, ax)),
    "p_value_histogram": lambda: single(
        lambda ax: plots.p_value_histogram({"known": [0.1, 0.9], "strange": [0.01]}, ax, false_alarms=0.05)
    ),
    "martingale_path": lambda: single(
        lambda ax: plots.martingale_path({"stream": [0.0, 1.0, 900.0]}, ax, thresholds=(20, 100))
    ),
    "training_curves": lambda: single(lambda ax: plots.training_curves(history_of([[1.0, 2.0], [0.0, 1.0]]), ax)),
    "member_count_curves": lambda: single(
        lambda ax: plots.member_count_curves([1, 2], {"a": ([2, 1], [0.1, 0.1]), "b": ([3, 2], [0.1, 0.1])}, ax)
    ),
    "drop_curve": lambda: single(
        lambda ax: plots.drop_curve(
            DropCurve("error", (0.5,), (1,), 1.0, (1.5,), (0.1,), exact=(1.4,)), ax, label="run"
        )
    ),
    "offset_bars": lambda: single(lambda ax: plots.offset_bars([0.5, 0.5], ax, ensemble_error=0.1)),
    "error_curves": lambda: single(
        lambda ax: plots.error_curves([Check(1, 5, 2.0, 1.0, 2.5, 1.5), Check(2, 10, 2.0, 0.1, 2.5, 1.5)], ax)
    ),
    "diversity_accuracy": lambda: single(
        lambda ax: plots.diversity_accuracy([Pair((0, 1), 0.8, 0.9, 1.0, 0.56, 1.39)], 10, ax)
    ),
}


def test_every_drawing_is_covered_here():
    drawings = {name for name in plots.__all__ if name.islower()} - {"panels", "save"}
    assert set(DRAWINGS) == drawings


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS.keys())
class TestDrawingContract:
    def test_settings_of_matplotlib_stay_as_they_were(self, draw, tmp_path):
        before = dict(matplotlib.rcParams)
        plots.save(draw(), tmp_path / "drawing", dpi=40)
        assert dict(matplotlib.rcParams) == before

    def test_no_figure_reaches_pyplot(self, draw):
        import matplotlib.pyplot as plt

        draw()
        assert plt.get_fignums() == []

    def test_drawn_again_it_gives_the_same_bytes(self, draw, tmp_path):
        files = []
        for name in ("first", "second"):
            torch.manual_seed(0)
            files.append([file.read_bytes() for file in plots.save(draw(), tmp_path / name, dpi=40)])
        assert files[0] == files[1]


def test_bands_lie_one_two_and_three_deviations_around_the_mean():
    x, mean, std = torch.tensor([1.0, 0.0]), torch.tensor([5.0, 2.0]), torch.tensor([0.5, 0.25])
    _, (ax,) = plots.panels()
    plots.bands(x, mean, std, ax, truth=[7.0, 8.0], points=([0.5], [3.0]))
    truth, centre, data = ax.lines
    # Inputs came in falling order; the line is drawn from left to right.
    np.testing.assert_array_equal(centre.get_xydata(), [[0, 2], [1, 5]])
    np.testing.assert_array_equal(truth.get_xydata(), [[0, 8], [1, 7]])
    np.testing.assert_array_equal(data.get_xydata(), [[0.5, 3]])
    for level, band in zip((3, 2, 1), ax.collections, strict=True):
        corners = band.get_paths()[0].vertices
        at_one = corners[corners[:, 0] == 1][:, 1]
        assert (at_one.min(), at_one.max()) == (5 - 0.5 * level, 5 + 0.5 * level)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_member_panels_and_the_mixtures_show_their_own_moments(family):
    x = torch.linspace(0, 1, 5)
    mean, scale = torch.randn(4, 5), torch.rand(4, 5) + 0.1
    figure = plots.member_bands(x, mean, scale, family=family, limits=(-9.0, 9.0))
    assert len(figure.axes) == 5
    for member, ax in enumerate(figure.axes[:4]):
        np.testing.assert_allclose(ax.lines[0].get_ydata(), mean[member], rtol=1e-6)
        factor = math.sqrt(2) if family == "laplace" else 1.0
        widest = ax.collections[0].get_paths()[0].vertices[:, 1]
        assert widest.max() == pytest.approx(float((mean + 3 * factor * scale)[member].max()), rel=1e-5)
    centre, std = mixture(mean, scale, family)
    np.testing.assert_allclose(figure.axes[4].lines[0].get_ydata(), centre, rtol=1e-5)
    narrowest = figure.axes[4].collections[2].get_paths()[0].vertices[:, 1]
    assert narrowest.max() == pytest.approx(float((centre + std).max()), rel=1e-5)
    assert all(ax.get_ylim() == (-9, 9) for ax in figure.axes)


def test_an_odd_number_of_members_leaves_no_empty_panel():
    figure = plots.member_bands([0, 1], torch.zeros(3, 2), torch.ones(3, 2))
    assert [ax.get_title() for ax in figure.axes] == ["member 0", "member 1", "member 2", "mixture of 3 members"]


def test_four_panels_show_the_grids_they_were_given():
    points, labels = torch.tensor([[0.0, 1.0], [0.5, -0.5], [0.1, 0.2]]), torch.tensor([0, 1, 0])
    data, knowledge = torch.rand(3, 3), torch.rand(3, 3)
    sure = torch.nn.functional.one_hot(torch.arange(9).reshape(3, 3) % 2, 2).float()
    figure = plots.four_panels(points, labels, [-2.0, 0.0, 2.0], sure, data, knowledge, title="all")
    scatter, mean, first, second = figure.axes[:4]
    np.testing.assert_allclose(scatter.lines[0].get_xydata(), points[labels == 0], rtol=1e-6)
    np.testing.assert_allclose(scatter.lines[1].get_xydata(), points[labels == 1], rtol=1e-6)
    # A certain ensemble shows pure colours; the first row is the lowest.
    np.testing.assert_allclose(mean.images[0].get_array()[0, 1], to_rgb(plots.COLOURS[1]))
    assert mean.images[0].origin == "lower"
    np.testing.assert_allclose(first.images[0].get_array(), data)
    np.testing.assert_allclose(second.images[0].get_array(), knowledge)
    # One scale for both, up to the largest entropy of two classes.
    assert {ax.images[0].get_clim() for ax in (first, second)} == {(0.0, math.log(2))}
    assert scatter.get_xlim() == scatter.get_ylim() == (-2.0, 2.0)


def test_uncertain_predictions_mix_the_colours_of_classes():
    figure = plots.class_maps([0, 1], torch.full((1, 2, 2, 2), 0.5), ["half"])
    expected = np.mean([to_rgb(colour) for colour in plots.COLOURS[:2]], axis=0)
    np.testing.assert_allclose(figure.axes[0].images[0].get_array()[0, 0], expected)


def test_reliability_shows_the_curves_points_and_its_error():
    _, (ax,) = plots.panels()
    plots.reliability(CURVE, ax, label="net")
    diagonal, line = ax.lines
    np.testing.assert_array_equal(diagonal.get_xydata(), [[0, 0], [1, 1]])
    np.testing.assert_allclose(line.get_xdata(), CURVE.confidence)
    np.testing.assert_allclose(line.get_ydata(), CURVE.accuracy)
    assert f"{CURVE.ece:.4f}" in line.get_label()
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(CURVE.weight.tolist())
    assert [bar.get_x() for bar in ax.patches] == pytest.approx(CURVE.lower.tolist())


def test_histograms_share_their_bins_and_have_area_one():
    known, unknown = torch.rand(50), torch.rand(80) + 0.5
    _, (ax,) = plots.panels()
    plots.score_histograms({"known": known, "unknown": unknown}, ax, bins=10)
    outlines = [patch for patch in ax.patches if not patch.get_fill()]
    assert [patch.get_label() for patch in outlines] == ["known", "unknown"]
    low, high = float(known.min()), float(unknown.max())
    for patch, values in zip(outlines, (known, unknown), strict=True):
        expected, edges = np.histogram(values, 10, (low, high), density=True)
        drawn = patch.get_xy()
        np.testing.assert_allclose(np.unique(drawn[:, 0]), edges, rtol=1e-5)
        # The outline goes up and down at every edge: its largest height between two edges is the bin's.
        middles = (edges[1:] + edges[:-1]) / 2
        steps = drawn[np.argsort(drawn[:, 0], kind="stable")]
        heights = [np.interp(middle, steps[:, 0], steps[:, 1]) for middle in middles]
        np.testing.assert_allclose(sorted(heights), sorted(expected), rtol=1e-4, atol=1e-6)


def test_training_curves_show_each_member_and_their_mean():
    _, (ax,) = plots.panels()
    plots.training_curves(history_of([[1.0, 3.0], [0.5, 0.7]]), ax, label="ours")
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1.0, 0.5], [3.0, 0.7], [2.0, 0.6]]
    assert all(list(line.get_xdata()) == [10, 20] for line in ax.lines)
    assert ax.lines[-1].get_label() == "ours"


def test_a_column_of_the_whole_ensemble_gives_one_line():
    _, (ax,) = plots.panels()
    plots.training_curves(history_of([[1.0, 3.0], [0.5, 0.7]]), ax, column="ensemble_loss")
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1.0, 2.0]]


def test_member_count_curves_show_values_and_standard_errors():
    _, (ax,) = plots.panels()
    plots.member_count_curves([1, 2, 4], {"NLL": ([3.0, 2.0, 1.5], [0.3, 0.2, 0.1])}, ax, ylabel="nats")
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 3], [2, 2], [4, 1.5]])
    corners = ax.collections[0].get_paths()[0].vertices
    at_four = corners[corners[:, 0] == 4][:, 1]
    assert (at_four.min(), at_four.max()) == pytest.approx((1.4, 1.6))
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "2", "4"]


def test_names_with_dollars_are_no_formulas(tmp_path):
    name, other = "from $5 to $10", "a_{$ of $"
    figure, axes = plots.panels(5)
    plots.score_histograms({name: [0.1, 0.3], other: [0.5]}, axes[0])
    plots.p_value_histogram({name: [0.1, 0.9], other: [0.5]}, axes[1])
    plots.martingale_path({name: [0.1, 0.9], other: [0.5]}, axes[2])
    plots.member_count_curves([1, 2], {name: ([2, 1], [0.1, 0.1]), other: ([2, 1], [0.1, 0.1])}, axes[3])
    history = History()
    history.add({"epoch": 1, "step": 5}, [0], {"$a and $b": [1.0]}, {})
    plots.training_curves(history, axes[4], column="$a and $b")
    text = plots.save(figure, tmp_path / "names", dpi=30)[0].read_text(encoding="utf-8")
    assert text.count(f">{name}</text>") == text.count(f">{other}</text>") == 4
    assert ">$a and $b</text>" in text
    maps = plots.class_maps([0, 1], torch.full((2, 2, 2, 3), 1 / 3), [name, other])
    text = plots.save(maps, tmp_path / "maps", dpi=30)[0].read_text(encoding="utf-8")
    assert text.count(f">{name}</text>") == text.count(f">{other}</text>") == 1


@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (lambda ax: plots.class_points([[0, 0], [1, 1]], [0, 7], ax), "colours for 7 classes; got 8"),
        (lambda ax: plots.score_histograms({"empty": []}, ax), "'empty'"),
        (lambda ax: plots.score_histograms({"bad": [float("nan")]}, ax), "'bad'"),
        (lambda ax: plots.score_histograms({}, ax), "at least one set"),
        (lambda ax: plots.training_curves(history_of([[1.0]]), ax, column="loos"), "loos"),
        (lambda ax: plots.member_bands([0], torch.zeros(2, 1, 1), torch.ones(2, 1, 1)), r"\(members, points\)"),
        (lambda ax: plots.class_maps([0, 1], torch.rand(1, 2, 2, 9), ["many"]), "9"),
        (
            lambda ax: plots.four_panels([[0, 0]], [0], [0, 1], torch.rand(2, 2, 3), torch.rand(2, 2), torch.rand(4)),
            "knowledge_uncertainty",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, match):
    _, (ax,) = plots.panels()
    with pytest.raises(ValueError, match=match):
        draw(ax)
