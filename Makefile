# make setup   the environment in .venv/ (nothing to do if pyproject.toml and constraints.txt did not change)
# make test    lint, then the whole test suite
# make lint    ruff and mypy
# make bench   benchmarks (half an hour; prints the tables of docs/performance.md and docs/evaluation.md)
# make demo    the demonstration

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup test lint format bench demo clean
.DEFAULT_GOAL := test

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make setup: no '$(PYTHON)' on this machine. Install Python 3.11 or newer, or say which one: make setup PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make setup: $$($(PYTHON) --version) is too old, iwopd needs 3.11 or newer. Say which one to use: make setup PYTHON=python3.12"; exit 1; }
	@echo "setup: environment in $(VENV)/ with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make setup: Python's venv module does not work here. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "setup: installing iwopd and its tools (torch is large: a few minutes without a cache)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' || { echo "make setup: pip failed, its words are above. Without a network or a mirror it cannot install; what is installed already stays. Try again with: make setup"; exit 1; }
	@touch $(STAMP)
	@echo "setup: done"

test: lint
	@$(BIN)/python -m pytest

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "make lint: run 'make format'"; exit 1; }
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/python bench/logprobs.py
	@$(BIN)/python bench/rollout.py
	@$(BIN)/python bench/step.py
	@$(BIN)/python bench/math_check.py
	@$(BIN)/python bench/code_check.py
	@$(BIN)/python bench/overlap.py

demo: setup
	@$(BIN)/iwopd demo

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
