# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
RUN := env -u PYTHONPATH $(BIN)

.PHONY: demo test lint types docs shapes bench clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.venv/.docs: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

demo: .venv/.installed
	$(RUN)/dissensus demo

test: .venv/.installed
	$(RUN)/python -m pytest -n 2 --dist worksteal -q

shapes: .venv/.installed
	$(RUN)/python -m pytest -n 2 -q -m "not slow" --jaxtyping-packages=dissensus,beartype.beartype tests

lint: .venv/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: .venv/.installed
	$(RUN)/mypy

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

bench: .venv/.installed
	$(RUN)/dissensus bench

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis
