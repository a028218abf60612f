"""The benchmark's table, page and check: a worse ratio is noticed."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from bench_records import result
from dissensus_bench import cases, one_run
from dissensus_bench.cases import LOOP
from dissensus_bench.check import check_comparable, find_slower, flat_ratios, keep_better, keep_worse, read_stored
from dissensus_bench.report import missing_peers, scaling_figure, write_results
from typer.testing import CliRunner

from dissensus import cli
from dissensus._machine import one_thread


def stored_file(folder, results, **about):
    path = folder / "stored.json"
    path.write_text(json.dumps({"about": {"device": "cpu", "quick": True} | about, "results": results}))
    return path


@pytest.fixture
def one_case(monkeypatch):
    """A single case, `small-mlps`, that takes its results from a list, run by run."""
    found = []
    case = cases.Case("A case.", lambda options: [result(found.pop(0))])
    monkeypatch.setattr(one_run, "CASES", {"small-mlps": case})
    return found


def test_reasons_of_several_cases_are_told_once():
    entries = [result(), result(), result() | {"missing": {"JAX vmap + scan": "for MLPs"}}]
    assert missing_peers(entries) == {"JAX vmap + scan": "not installed; for MLPs"}


def test_only_ratios_worse_than_the_tolerance_are_slower():
    now, stored = {"a": 1.0, "b": 1.0, "new": 1.0}, {"a": 1.49, "b": 1.51, "old": 9.0}
    assert [worse.name for worse in find_slower(now, stored)] == ["b"]


def test_nothing_in_common_is_an_error_and_not_a_pass():
    with pytest.raises(ValueError, match="None of the stored ratios"):
        find_slower({"a": 1.0}, {"b": 1.0})


def test_ratios_that_only_one_side_has_are_named(tmp_path, one_case):
    one_case.append(4.0)
    gone, elsewhere = result(9.0, what="another job"), result(9.0, case="heads")
    ended = bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0), gone, elsewhere]))
    assert ended.exit_code == 0
    told = [line for line in ended.stderr.splitlines() if "Not compared" in line]
    assert told == [
        "Not compared, as it was not measured in this run: small-mlps | another job | captured against plain loop"
    ]
    both = result(4.0) | {"ratios": {"captured against plain loop": 4.0, "auto against plain loop": 1.0}}
    one_run.CASES["small-mlps"] = cases.Case("A case.", lambda options: [both])
    ended = bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)]))
    assert "Not compared, as it is not stored: small-mlps | a job | auto against plain loop" in ended.stderr


def test_of_two_measurements_the_better_one_counts():
    both = keep_better(result(2.0), result(3.0))
    assert both["ratios"] == {"captured against plain loop": 3.0}
    assert both["sides"][LOOP] == {"ms": 2.0}


def test_what_is_stored_of_several_runs_is_the_worse_ratio():
    both = keep_worse(result(2.0), result(3.0))
    assert both["ratios"] == {"captured against plain loop": 2.0}


def test_a_reference_is_stored_from_several_runs(tmp_path, monkeypatch, one_case):
    one_case += [3.0, 2.0, 4.0]
    script = Path(__file__).parents[1] / "speed.py"
    stored = tmp_path / "reference.json"
    asked = ["--device", "cpu", "--quick", "--cases", "small-mlps", "--runs", "3"]
    places = ["--output", str(tmp_path / "out"), "--store", str(stored)]
    monkeypatch.setattr("sys.argv", [str(script), *asked, *places])
    runpy.run_path(str(script), run_name="__main__")
    assert [*flat_ratios(read_stored(stored)["results"]).values()] == [2.0]


@pytest.mark.parametrize("about", [{"device": "cuda"}, {"quick": False}])
def test_only_runs_of_one_kind_are_compared(about):
    with pytest.raises(ValueError, match="same way"):
        check_comparable({"device": "cpu", "quick": True} | about, {"about": {"device": "cpu", "quick": True}})


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"about": {}, "results": []}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "stored.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json"):
        read_stored(path)


def bench(tmp_path, *arguments):
    given = ["bench", "--device", "cpu", "--quick", "--cases", "small-mlps", "--output", str(tmp_path / "out")]
    return CliRunner().invoke(cli.app, [*given, *map(str, arguments)])


def test_check_fails_on_a_ratio_that_stays_worse(tmp_path, one_case):
    one_case += [2.0, 2.1, 2.6, 2.0]
    ended = bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)]))
    assert ended.exit_code == 1
    assert "Slower than stored" in ended.stderr
    assert "2.6, stored 4 (1.54 x worse)" in ended.stderr, "the best of all measurements"
    assert one_case == [], "measured three times more before it is believed"


@pytest.mark.parametrize("measured", [[2.0, 3.9], [2.0, 1.0, 3.9], [2.0, 1.0, 2.0, 3.9]])
def test_check_passes_once_a_measurement_is_good(tmp_path, one_case, measured):
    one_case += [*measured, 99.0]
    assert bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)])).exit_code == 0
    assert one_case == [99.0]


def test_check_measures_once_when_nothing_is_worse(tmp_path, one_case):
    one_case += [3.0, 99.0]
    assert bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)])).exit_code == 0
    assert one_case == [99.0]


def test_the_command_writes_results_figures_and_a_page(tmp_path, one_case):
    one_case.append(3.0)
    ended = bench(tmp_path)
    assert ended.exit_code == 0, ended.output
    assert {"results.json", "small-mlps.svg", "small-mlps.png", "report.html"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    written = read_stored(tmp_path / "out" / "results.json")
    assert flat_ratios(written["results"]) == {"small-mlps | a job | captured against plain loop": 3.0}
    assert {"date", "processor", "cores", "python", "versions"} <= set(written["about"])
    assert "torch" in written["about"]["versions"]


def test_scaling_is_drawn_as_a_line_for_each_side(tmp_path):
    points = [result(value, "scaling") | {"axis": "members", "value": value} for value in (1, 10, 100)]
    (ax,) = scaling_figure(points).axes
    assert [line.get_xdata().tolist() for line in ax.lines] == [[1, 10, 100]] * 2
    write_results(tmp_path, {"device": "cpu"}, points)
    assert (tmp_path / "scaling.svg").exists()


def test_without_matplotlib_there_is_a_page_without_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus_bench.report.find_spec", lambda name: None)
    page = write_results(tmp_path, {"device": "cpu"}, [result()])
    assert "<svg" not in page.read_text()
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--cases", "smal-mlps"), "'smal-mlps'"),
        (("--engines", "fast"), "'fast'"),
        (("--device", "tpu"), "'tpu'"),
        (("--check", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_cannot_be_measured_ends_in_one_sentence(tmp_path, arguments, word):
    ended = bench(tmp_path, *arguments)
    assert ended.exit_code == 2
    assert word in ended.stderr


def test_the_stored_reference_is_a_quick_run_on_a_cpu():
    stored = read_stored(Path(__file__).parents[1] / "reference.json")
    assert (stored["about"]["device"], stored["about"]["quick"]) == ("cpu", True)
    names = {entry["case"] for entry in stored["results"]}
    assert names == set(cases.default_cases(quick=True))


def test_threads_are_set_back():
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
