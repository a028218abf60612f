"""The command line: what it lists, what it passes on, and how it fails."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import dissensus_studies as studies
import pytest
import typer
from typer.testing import CliRunner

import dissensus
from dissensus import cli, demo

ROOT = Path(__file__).parents[1]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def calls(monkeypatch):
    """Two studies and the demo, replaced by what they were called with."""
    made = []

    def run(*args, **kwargs):
        made.append((args, kwargs))
        return Path("somewhere/report.html")

    monkeypatch.setitem(sys.modules, "a_study", SimpleNamespace(run=run))
    entries = [
        studies.Study("toy", "A toy.", "a_study"),
        studies.Study("real-data", "Something real.", "no_such_module"),
    ]
    monkeypatch.setattr(studies, "STUDIES", {entry.name: entry for entry in entries})
    monkeypatch.setattr(demo, "run", run)
    return made


def test_the_installed_command_is_main():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dissensus"]
    module, name = script.split(":")
    assert getattr(import_module(module), name) is cli.main


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in cli.app.registered_commands:
        assert command.callback.__name__ in result.output


@pytest.mark.parametrize(
    "function", [command.callback for command in cli.app.registered_commands], ids=lambda f: f.__name__
)
def test_every_command_and_every_option_explains_itself(function):
    command = function.__name__
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert function.__doc__.splitlines()[0][:40] in " ".join(result.output.split())
    for name, annotation in function.__annotations__.items():
        if name != "return" and annotation is not typer.Context:
            assert annotation.__metadata__[0].help, f"{command}: {name} has no help"


def test_no_command_shows_the_help():
    assert "Usage" in invoke().output


def test_version():
    assert invoke("--version").output == f"dissensus {dissensus.__version__}\n"


def test_demo_passes_its_options_on(calls):
    assert invoke("demo", "--output", "there", "--members", "3", "--seed", "7").exit_code == 0
    assert calls == [((Path("there"),), {"num_members": 3, "seed": 7})]


def test_demo_writes_into_an_ignored_folder_by_default(calls):
    assert invoke("demo").exit_code == 0
    ((folder,), _) = calls[0]
    assert f"/{folder}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_study_alone_lists_the_studies(calls):
    result = invoke("study")
    assert result.exit_code == 0
    assert result.output == "toy        A toy.\nreal-data  Something real.\n"
    assert calls == []


def test_study_runs_the_one_that_is_named(calls, tmp_path):
    result = invoke("study", "toy", "--quick", "--seed", "3", "--output", tmp_path, "--data", "data")
    assert result.exit_code == 0, result.output
    assert calls == [((tmp_path,), {"quick": True, "seed": 3, "data": Path("data")})]
    assert "somewhere/report.html" in result.output


def test_study_has_a_folder_of_its_own_by_default(calls):
    assert invoke("study", "toy").exit_code == 0
    assert calls == [((Path("runs/toy"),), {"quick": False, "seed": 0, "data": None})]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("study", "toi"), ["'toi'", "toy, real-data"]), (("study", "real-data"), ["no_such_module"])],
)
def test_what_cannot_be_run_ends_in_one_sentence_and_code_2(calls, arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("error", [ValueError("[bold]wanted 2; got 1[/bold]."), OSError("no room on the disk.")])
def test_errors_of_the_user_are_shown_as_they_are_without_a_traceback(monkeypatch, capsys, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(demo, "run", fail)
    monkeypatch.setattr(sys, "argv", ["dissensus", "demo"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_mistakes_of_ours_are_not_hidden(monkeypatch):
    def fail(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr(demo, "run", fail)
    assert isinstance(invoke("demo").exception, KeyError)


def test_help_loads_nothing_that_only_commands_need():
    code = (
        "import sys; from dissensus.cli import app; app(['--help'], standalone_mode=False);"
        "print(*[name for name in ('torch', 'matplotlib', 'sklearn', 'pandas', 'dissensus.demo', 'dissensus.plots')"
        " if name in sys.modules], file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "demo" in run.stdout
    assert run.stderr.strip() == ""
