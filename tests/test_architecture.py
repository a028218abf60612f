"""Imports point one way along the arrow of the design, and importing the package stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dissensus
from dissensus import members

PACKAGE = Path(dissensus.__file__).parent
# Each layer may import from itself and from the layers before it.
LAYERS = [
    {"types", "randomness", "construction", "_checks", "_files", "_signatures"},
    {"masks", "architectures", "nets"},
    {"data"},
    {"engines", "_machine"},
    {"members"},
    {"objectives"},
    {"_beliefs", "scores", "detectors"},
    {"predictions", "caching", "aggregation"},
    {"training"},
    {"metrics"},
    {"conformal", "diagnostics", "probing", "saving"},
    {"evaluation"},
    {"onnx_files", "exporting", "serving", "tracking"},
    {"plots", "html"},
    {"reporting"},
    {"estimators", "recipes", "testing"},
    {"demo"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield path, parts[0]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dissensus":
            tail = node.module.split(".")[1:]
            yield from ([tail[0]] if tail else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("dissensus."))


@pytest.mark.parametrize(("path", "layer"), list(modules()), ids=lambda value: str(getattr(value, "stem", value)))
def test_imports_point_down(path, layer):
    assert layer in LEVEL, f"{layer} has no place in LAYERS"
    for name in imported(path):
        if name in LEVEL:
            assert LEVEL[name] <= LEVEL[layer], f"{path.name} ({layer}) imports {name}, which is above it"


@pytest.mark.parametrize(
    "path", sorted(path for name in ("training", "engines") for path in (PACKAGE / name).rglob("*.py"))
)
def test_training_knows_no_kind_by_name(path):
    """What a kind does differently it says itself: `reader`, `adapt`, `identity`, `single`, ... of `Members`."""
    kinds = set(members.__all__) - {"Members", "View"}
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert not kinds & (names | set(imported_names(path)))


def test_one_place_reads_what_users_hand_over_and_one_feeds_training():
    """Predictions, evaluation and caching take batches from `data/sources.py`; only training, which shuffles, has feeds of its own."""
    loading = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("DataLoader", "default_collate")
    }
    assert loading == {"data/sources.py", "training/feeds.py"}


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dissensus.members"):
            yield from (alias.name for alias in node.names)


BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.comprehension, ast.Lambda)


def complexity(function: ast.AST) -> int:
    """Return McCabe's number: one, and one for each place where a reader has to think of two ways; inner functions count apart."""
    number = 1
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef):
            number += isinstance(node, BRANCHES)
            number += len(node.ifs) if isinstance(node, ast.comprehension) else 0
            number += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
            waiting += ast.iter_child_nodes(node)
    return number


def test_functions_are_simple():
    found = {
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}": complexity(node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: number for name, number in found.items() if number > 15} == {}
    assert sum(number > 10 for number in found.values()) <= 40


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_pickle_and_no_network_in_the_package(path):
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert not names & {"pickle", "shelve", "urllib", "requests", "socket", "http"}
    assert "torch.load(" not in path.read_text()


def test_no_module_shares_the_name_of_a_public_name_beside_it():
    for path in PACKAGE.rglob("__init__.py"):
        beside = {p.stem for p in path.parent.glob("*.py")} | {p.name for p in path.parent.iterdir() if p.is_dir()}
        public = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and f"{path.parent.name}." in f"{node.module}."
            for alias in node.names
            if node.module.split(".")[-1] in beside
        }
        assert not public & beside, path


def test_importing_pulls_in_nothing_heavy():
    heavy = [
        "pandas",
        "sklearn",
        "matplotlib",
        "torchvision",
        "timm",
        "ray",
        "rich",
        "typer",
        "scipy",
        "pyarrow",
        "PIL",
        "jaxtyping",
    ]
    code = "import sys, dissensus; print([m for m in sys.argv[1:] if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.slow
def test_importing_costs_little_more_than_importing_torch():
    # Processor time: that of the clock belongs to whatever else the machine does. Without collecting garbage, which falls into
    # one import or the other.
    code = (
        "import gc, time; gc.disable(); a = time.process_time(); import torch; b = time.process_time(); import dissensus; "
        "print((time.process_time() - a) / (b - a))"
    )
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(5)]
    ratio = min(float(run.stdout) for run in found)
    assert ratio < 1.25
