# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
RUN := env -u PYTHONPATH $(BIN)

.PHONY: demo test test-all attack lint types results docs shapes bench bench-check clean

.venv/.installed: pyproject.toml constraints.txt studies/pyproject.toml benchmarks/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e ./studies -e ./benchmarks
	touch $@

.venv/.docs: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

demo: .venv/.installed
	$(RUN)/dissensus demo

test: .venv/.installed
	$(RUN)/python -m pytest -n 2 --dist worksteal -q -m "not slow"

.venv/.test-all: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test-all]"
	touch $@

# What takes long or needs extras, and the tests and doctests of studies and benchmarks; `make test` has the rest.
test-all: .venv/.test-all
	$(RUN)/python -m pytest -n 2 --dist worksteal -q -m slow
	$(RUN)/python -m pytest -n 2 --dist worksteal -q studies benchmarks

attack: .venv/.installed
	$(RUN)/python -m attacks

# The shapes in signatures as tests: the pure functions, whose own checks do not come first.
SHAPED := dissensus.scores,dissensus.detectors,dissensus.masks,dissensus.metrics,dissensus.data.corruptions
shapes: .venv/.installed
	$(RUN)/python -m pytest -n 2 -q --jaxtyping-packages=$(SHAPED),beartype.beartype tests/test_scores.py tests/test_variances.py \
		tests/test_detectors.py tests/test_masks.py tests/test_metrics_*.py tests/test_corruption*.py

lint: .venv/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

# The server's own dependencies are typed too, so the extras must be there.
types: .venv/.test-all
	$(RUN)/mypy

# Pages of docs/results from studies/records and benchmarks/records.
results: .venv/.installed
	$(RUN)/python -m dissensus_studies.results
	$(RUN)/python -m dissensus_bench.page

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

bench: .venv/.installed
	$(RUN)/dissensus bench

bench-check: .venv/.installed
	$(RUN)/dissensus bench --device cpu --quick --check benchmarks/reference.json

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis
