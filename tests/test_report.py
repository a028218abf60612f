"""Reports: a section for everything that was measured, none for what was not, and figures that show the numbers."""

import re
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from evaluation_cases import (
    as_floats,
    classifier,
    image_classifier,
    images,
    labelled,
    regression_data,
    regressor,
    trained_classifier,
    unlabelled,
)

from dissensus.evaluation import Disputed, Histogram, Number, evaluate
from dissensus.html import Table
from dissensus.predictions import predict
from dissensus.reporting import figures, report, sections
from dissensus.scores import total_entropy

TIMES = "\N{MULTIPLICATION SIGN}"
ALL_SECTIONS = [
    "Main numbers",
    "Can its confidence be believed?",
    "Telling known from unknown",
    "Under corruption",
    "How uncertain it is, and why",
    "Members and ensemble",
    "Do members collude?",
    "Disputed inputs",
    "Input by input",
    "How this page was made",
]


@pytest.fixture(scope="module")
def full():
    """An evaluation that has something for every section."""
    return evaluate(
        image_classifier(),
        images(80),
        {"noise": images(60, seed=7)[0] // 2, "dark": images(60, seed=8)[0] // 4},
        groups={"both": ["noise", "dark"]},
        corruptions=("gaussian_noise", "contrast"),
        severities=(1, 3, 5),
        transform=as_floats,
        class_names=("red <b>", "green", "blue"),
        bootstrap=40,
        name="three nets",
    )


@pytest.fixture(scope="module")
def full_page(full, tmp_path_factory):
    return page_of(full, tmp_path_factory.mktemp("full"), title="All of it")


@pytest.fixture(scope="module")
def plain():
    return evaluate(trained_classifier(), labelled(80), {"far": unlabelled(60)}, bootstrap=40, name="four nets")


def page_of(results, folder, **options):
    return report(results, folder / "report.html", **options).read_text(encoding="utf-8")


def titles(page):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page)


def section(page, title):
    return page.split(f">{title}</h2>")[1].split("</section>")[0]


def test_a_full_evaluation_has_every_section(full_page):
    page = full_page
    assert titles(page) == ALL_SECTIONS
    assert "<h1>All of it</h1>" in page
    for title in ALL_SECTIONS:
        assert "<p>" in section(page, title), f"{title} does not say how to read it"
    for svg in re.findall(r"<svg [^>]*>", page):
        assert re.search(r'aria-label="[^"]{20,}"', svg)
    assert "http" not in page
    assert page.count("<script>") == 1  # that of the table that can be searched
    assert "red <b>" not in page


def test_every_headline_number_stands_on_the_page_with_its_interval(full, full_page):
    page = full_page.replace("\N{NO-BREAK SPACE}", " ")
    numbers = [full.number(metric) for metric in ("accuracy", "nll", "brier", "ece", "smooth_ece")]
    numbers += [full.number("auroc", name, score=score) for name in ("noise", "both") for score in full.score_names]
    numbers += [full.number("accuracy", name, severity=5) for name in ("gaussian_noise", "contrast")]
    for number in numbers:
        text = "{:.3f} [{:.3f}, {:.3f}]".format(*(value + 0.0 for value in (number.value, number.low, number.high)))
        assert text in page, number


def test_the_lead_tells_of_groups_in_place_of_their_sets(full, full_page):
    lead = re.search(r'<p class="lead">(.*?)</p>', full_page, flags=re.DOTALL)[1]
    assert f"{full.number('auroc', 'both', score='total_entropy').value:.3f} (both)" in lead
    assert "(noise)" not in lead
    assert "(dark)" not in lead


def test_sections_without_data_are_left_out(plain, tmp_path):
    missing = {"Under corruption", "Disputed inputs"}
    assert titles(page_of(plain, tmp_path)) == [title for title in ALL_SECTIONS if title not in missing]
    bare = evaluate(classifier(1), labelled(40), bootstrap=0)
    assert titles(page_of(bare, tmp_path)) == [
        "Main numbers",
        "Can its confidence be believed?",
        "Input by input",
        "How this page was made",
    ]
    assert "[" not in section(page_of(bare, tmp_path), "Main numbers")


@pytest.mark.parametrize("loss", ["gaussian_nll", "mse"])
def test_regression_has_the_sections_that_fit_it(loss, tmp_path):
    ensemble = regressor(2 if loss == "gaussian_nll" else 1)
    result = evaluate(ensemble, regression_data(60), {"far": unlabelled(50)}, loss=loss, bootstrap=30)
    page = page_of(result, tmp_path)
    of_densities = ["Can its intervals be believed?"] if loss == "gaussian_nll" else []
    parts = ["How uncertain it is, and why"] if loss == "gaussian_nll" else []
    assert titles(page) == [
        "Main numbers",
        *of_densities,
        "Telling known from unknown",
        *parts,
        "Members and ensemble",
        "Do members collude?",
        "Input by input",
        "How this page was made",
    ]
    assert "RMSE" in section(page, "Main numbers")


def test_runs_stand_side_by_side_with_paired_differences(plain, tmp_path):
    other = evaluate(classifier(4, seed=2), labelled(80), {"far": unlabelled(60)}, bootstrap=40, name="untrained")
    page = page_of([plain, other], tmp_path)
    assert titles(page)[:2] == ["Main numbers", "Differences between runs"]
    for title in titles(page):
        assert "untrained" in section(page, title), title
        assert "four nets" in section(page, title), title
    assert "untrained less four nets" in section(page, "Differences between runs")


def test_runs_that_cannot_be_paired_have_no_differences_and_the_page_says_why(plain, tmp_path):
    other = evaluate(classifier(4, seed=2), labelled(70), {"far": unlabelled(60)}, bootstrap=40, name="elsewhere")
    said = section(page_of([plain, other], tmp_path), "Differences between runs")
    assert "elsewhere is not compared with four nets" in said
    assert "inputs, so they cannot be paired" in said
    assert "<table" not in said


def test_one_run_is_not_compared(plain, tmp_path):
    assert "Differences between runs" not in titles(page_of([plain], tmp_path))


def test_runs_of_one_name_are_numbered(plain, tmp_path):
    page = page_of([plain, plain, plain], tmp_path)
    assert "four nets (2)" in page
    assert "four nets (3)" in page


def test_the_chosen_score_is_that_of_curves_and_tables(plain, tmp_path):
    page = page_of(plain, tmp_path, score="mean_pairwise_kl")
    assert "by mean pairwise KL it tells" in page
    assert "by mean pairwise KL" in section(page, "Telling known from unknown")
    with pytest.raises(ValueError, match=r"`score` must be one that every run has.*got 'entropy'"):
        page_of(plain, tmp_path, score="entropy")


def test_what_cannot_share_a_page_is_refused(plain, tmp_path):
    regression = evaluate(regressor(), regression_data(40), loss="gaussian_nll", bootstrap=0)
    with pytest.raises(ValueError, match="of one task; got classification, density"):
        page_of([plain, regression], tmp_path)
    for given, kinds in (([], "none"), ([plain, "run"], "Evaluation, str")):
        with pytest.raises((ValueError, TypeError), match=f"what `evaluate` returned.*; got {kinds}|results"):
            page_of(given, tmp_path)
    one, two = (evaluate(classifier(2), labelled(40), scores=[name], bootstrap=0) for name in ("bma", "max_logit"))
    with pytest.raises(ValueError, match="a score in common"):
        page_of([one, two], tmp_path)


def test_the_same_evaluation_gives_the_same_page_and_leaves_matplotlib_alone(plain, tmp_path):
    before = dict(mpl.rcParams)
    assert page_of(plain, tmp_path) == page_of(plain, tmp_path)
    assert dict(mpl.rcParams) == before


def test_a_saved_evaluation_gives_the_same_page(full, full_page, tmp_path):
    again = type(full).load(full.save(tmp_path / "evaluation.json"))
    assert page_of(again, tmp_path, title="All of it") == full_page


def test_histograms_and_rocs_draw_what_the_evaluation_holds(plain):
    parts = [part for part in plain.histograms if part.score == "bma"]
    (ax,) = figures.score_histogram(parts, "x", "t", figures.common_axis(parts)).axes
    assert [label for label in ax.get_legend_handles_labels()[1]] == ["id", "far"]
    np.testing.assert_allclose(ax.patches[-1].get_data().values, parts[-1].shares)
    (roc,) = [part for part in plain.rocs if part.score == "bma"]
    (ax,) = figures.roc_diagram({"bma": roc}, "t").axes
    np.testing.assert_allclose(ax.lines[-1].get_xydata(), np.column_stack([roc.fpr, roc.tpr]))


def test_skewed_scores_are_shown_on_a_logarithmic_axis():
    x, y = labelled(300)
    # Confident on most inputs, unsure where the classes meet: mutual information spans orders of magnitude.
    result = evaluate(trained_classifier(), (3 * x, y), {"far": unlabelled(200)}, bootstrap=0)
    parts = [part for part in result.histograms if part.score == "mutual_information"]
    assert parts[0].logarithmic
    ratios = np.array(parts[0].edges[1:]) / np.array(parts[0].edges[:-1])
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-4)
    assert figures.score_histogram(parts, "x", "t", figures.common_axis(parts)).axes[0].get_xscale() == "log"
    assert sum(parts[0].shares) == pytest.approx(1)
    assert not next(part for part in result.histograms if part.score == "max_logit").logarithmic


def test_severity_curves_show_intervals_only_where_all_levels_have_one():
    numbers = {level: Number("accuracy", "id", "id", 1 / (level + 1), low=0.1, high=0.9) for level in range(3)}
    (ax,) = figures.severity_curves({"run": numbers}, "accuracy").axes
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 1], [1, 1 / 2], [2, 1 / 3]])
    assert len(ax.collections) == 1
    numbers[1] = replace(numbers[1], low=None, high=None)
    (ax,) = figures.severity_curves({"run": numbers}, "accuracy").axes
    assert len(ax.collections) == 0


def test_uncertainty_bars_add_up_to_the_total():
    (ax,) = figures.uncertainty_bars({"id": {"data": 0.25, "knowledge": 0.5}}, "nats", "").axes
    data, knowledge = ax.patches
    assert (data.get_width(), knowledge.get_x(), knowledge.get_width()) == (0.25, 0.25, 0.5)
    assert ax.texts[0].get_text() == "0.750"


@pytest.mark.parametrize(
    ("label", "names", "lines"),
    [
        (1, (), ["is 1", "says 0", f"0 {TIMES}3, 1 {TIMES}1, 2 {TIMES}1"]),
        (
            None,
            ("cat", "dog", "a very long name of a class"),
            ["is unknown", "says cat", f"cat {TIMES}3, dog {TIMES}1", f"a very long name of… {TIMES}1"],
        ),
    ],
)
def test_votes_are_counted_under_each_picture(label, names, lines):
    item = Disputed("id", True, 4, 0.5, 0, label, (0, 0, 1, 2, 0), (1, 2, 2), bytes(4))
    assert figures.votes_lines(item, names) == lines
    figure = figures.votes_sheet([item] * 4, names)
    assert len(figure.axes) == 4
    assert [text.get_text() for text in figure.axes[0].texts] == lines


def test_histograms_of_several_runs_share_an_axis():
    even = Histogram("id", "bma", (0.0, 0.25, 0.5), (0.4, 0.6), False)
    skewed = Histogram("id", "bma", (0.001, 0.01, 0.1), (0.7, 0.3), True)
    axis = figures.common_axis([even, skewed])
    assert axis == {"xscale": "log", "xlim": (0.001, 0.5)}
    for part in (even, skewed):
        (ax,) = figures.score_histogram([part], "x", "t", axis).axes
        assert ax.get_xscale() == "log"
        assert ax.get_xlim() == (0.001, 0.5)
    below = Histogram("id", "mean_energy", (-2.0, 0.0, 1.0), (0.5, 0.5), False)
    assert figures.common_axis([below, skewed]) == {"xscale": "linear", "xlim": (-2.0, 1.0)}


def test_a_page_is_called_by_its_target_data_and_date(plain, tmp_path):
    named = replace(plain, data="houses.csv", target="price", date="2026-11-08")
    page = page_of(named, tmp_path)
    assert "<h1>price, predicted from houses.csv</h1>" in page
    assert "8 November 2026 · four nets · inputs: 80 known, 60 far" in page
    assert "<h1>2 runs side by side on houses.csv</h1>" in page_of([named, named], tmp_path)
    assert "<h1>four nets on 80 known inputs</h1>" in page_of(plain, tmp_path)


def test_a_page_begins_with_the_default_score_and_the_best_one(plain, tmp_path):
    def auroc(name):
        return plain.number("auroc", "far", score=name).value

    best = max(plain.score_names, key=lambda name: round(auroc(name), 3))
    default = min(plain.score_names, key=auroc)
    assert round(auroc(default), 3) < round(auroc(best), 3)
    page = page_of(plain, tmp_path, score=default)
    top = page.split("<dl")[1].split("</dl>")[0]
    values = re.findall(r"<b>([^<]+)</b>", top)
    assert values[2:] == [f"{auroc(default):.3f}", f"{auroc(best):.3f}"]
    assert "the default score" in top
    assert "the best score" in top
    # In the table both rows stand out, and of the column what is largest as printed.
    table = section(page, "Telling known from unknown").split("</table>")[0]
    assert table.count('<tr class="main">') == 2
    bold = {float(text.split()[0]) for text in re.findall(r"<strong>([^<]+)</strong>", table)}
    assert bold == {round(max(map(auroc, plain.score_names)), 3)}


def test_the_best_run_of_a_set_is_bold_and_equal_ones_are_not():
    def best(*cells, large):
        table = Table(["value"], [[cell] for cell in cells])
        return [row for row, _ in sections.best_cells(table, range(len(cells)), 0, large=large)]

    assert best("0.500", "–", "0.750 [0.7, 0.8]", large=True) == [2]
    assert best("0.500", "0.500", "0.750", large=False) == [0, 1]
    assert best("0.500", "0.500", large=True) == []
    assert best("57\u202f500 [50\u202f040, 64\u202f840]", "6000", large=True) == [0]


def test_errors_are_in_the_units_of_the_target_with_its_name(tmp_path):
    x, y = regression_data(60)
    result = evaluate(regressor(1), (x, 40_000 * y + 300_000), loss="mse", bootstrap=0)
    page = page_of(replace(result, target="price"), tmp_path)
    rmse = float(f"{result.number('rmse').value:.4g}")
    shown = f"{rmse:,.0f}".replace(",", "\u202f")
    assert f"predicts price of 60 known inputs with an error (RMSE) of {shown}." in page
    assert "RMSE (price)" in section(page, "Main numbers")
    assert not re.search(r"\de\+\d", page)


def test_names_with_dollars_stand_in_figures_as_they_are(tmp_path):
    """Names of sets, runs, classes and targets: two dollars are a formula to matplotlib, and a brace in it an error."""
    wild = "{$ or $"
    run = evaluate(
        image_classifier(),
        images(40),
        {f"far {wild}": images(40, seed=7)[0] // 2},
        shifted={f"later {wild}": images(40, seed=3)},
        transform=as_floats,
        class_names=(f"red {wild}", f"blue {wild}", f"green {wild}"),
        bootstrap=0,
        name=f"run {wild}",
    )
    x, y = regression_data(60)
    density = evaluate(regressor(2), (x, y), {f"far {wild}": 3 * x}, loss="gaussian_nll", bootstrap=0)
    density = replace(density, target=f"price {wild}", name=f"run {wild}")
    for name, results in {"one": [run], "two": [run, replace(run, name=f"again {wild}")], "density": [density]}.items():
        page = report(results, tmp_path / f"{name}.html").read_text(encoding="utf-8")
        shown = re.findall(r"<text[^>]*>([^<]*)</text>", page)
        with_dollars = [text for text in shown if "$" in text]
        assert all(text.count(wild) == text.count("$") / 2 for text in with_dollars), with_dollars
        wanted = ["far", "price"] if name == "density" else ["far", "later", "is red", "says "]
        for part in wanted:
            assert any(text.startswith(part) or f"({part}" in text for text in with_dollars), part


def test_a_variance_of_classes_is_no_variance_of_a_target(tmp_path):
    name = "predicted_class_variance"
    run = evaluate(
        trained_classifier(), labelled(60), {"far": unlabelled(50)}, scores=["total_entropy", name], bootstrap=0
    )
    page = page_of(replace(run, target="colour"), tmp_path, score=name)
    assert "predicted class variance" in page
    assert "predicted class standard deviation" not in page
    assert sections._shown_scores([run], "total_entropy") == ["total_entropy"]
    part = next(part for part in run.histograms if part.score == name)
    assert sections._rooted(part) == part


def test_remarks_stand_in_a_box(plain, tmp_path):
    page = page_of(replace(plain, remarks=("Probably undertrained: the loss still fell.",)), tmp_path)
    assert '<p class="remark">Probably undertrained: the loss still fell.</p>' in page


def test_single_inputs_are_the_least_certain_with_what_was_predicted():
    ensemble, (x, y) = trained_classifier(), labelled(400)
    result = evaluate(ensemble, (x, y), {"far": unlabelled(30)}, bootstrap=0)
    known, far = result.examples
    logits = predict(ensemble, x)
    entropy, probs = total_entropy(logits), logits.softmax(-1).mean(0)
    order = entropy.argsort(descending=True)[:300]
    assert known.scores["total_entropy"] == pytest.approx(entropy[order].tolist(), rel=1e-4, abs=1e-6)
    rows = list(known.index)
    assert known.predicted == tuple(probs[rows].argmax(-1).tolist())
    assert known.confidence == pytest.approx(probs[rows].amax(-1).tolist(), rel=1e-5)
    assert known.truth == tuple(y[rows].tolist())
    assert (len(far.index), far.truth) == (30, ())


def test_single_inputs_of_a_regression_have_their_mean():
    ensemble, (x, y) = regressor(1), regression_data(60)
    (known,) = evaluate(ensemble, (x, y), loss="mse", bootstrap=0).examples
    rows = list(known.index)
    assert known.predicted == pytest.approx(predict(ensemble, x).mean(0)[rows, 0].tolist(), rel=1e-5)
    assert known.truth == pytest.approx(y.reshape(len(y), -1)[rows, 0].tolist(), rel=1e-5)
    assert known.confidence == ()


def test_points_of_members_can_be_read_where_the_pointer_rests(plain, full_page):
    dots = section(full_page, "Members and ensemble")
    assert re.findall(r"<title>(member \d+): [\d.]+</title>", dots)[:3] == ["member 0", "member 1", "member 2"]
