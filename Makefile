# `make demo` and `make test` do all set-up themselves. The environment is .venv; PYTHON chooses what it is made with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-tests
PROJECTS := $(wildcard core/pyproject.toml cli/pyproject.toml plugins/*/pyproject.toml plugins/*/*/pyproject.toml)
PACKAGES := core/prl cli/prl_cli $(wildcard plugins/*/prl_*) $(wildcard plugins/*/*/prl_*)
PYTEST := $(BIN)/python -m pytest -rs

.PHONY: help setup vllm lint test test-slow test-gpu demo bench-peer bench-overlap bench-dataplane bench-generation bench-vllm bench-trainer bench-head bench-kernels clean

help:
	@echo "make setup            create .venv and install every distribution into it"
	@echo "make vllm             vLLM for a CPU in an environment of its own, in the user's cache; make test does it too"
	@echo "make demo             a complete run on this machine: warm-up, reinforcement learning, evaluation, a summary"
	@echo "make test             the tests that take seconds; skipped ones are listed with their reason"
	@echo "make test-slow        the tests that take minutes: whole runs, wheels built and installed"
	@echo "make test-gpu         the tests that need an NVIDIA GPU"
	@echo "make lint             ruff, mypy, import-linter"
	@echo "make bench-peer       the demo beside TRL's GRPO, where TRL is installed"
	@echo "make bench-overlap    how much asynchrony gains"
	@echo "make bench-dataplane  rollouts and packed tokens per second"
	@echo "make bench-generation CPU time of engine and gateway"
	@echo "make bench-vllm       tokens per second through prl and of vLLM alone, on one NVIDIA GPU"
	@echo "make bench-trainer    the trainer's step beside its peer's, on one NVIDIA GPU"
	@echo "make bench-head       memory of the chunked head beside the plain one"
	@echo "make bench-kernels    attention, operations and head on an NVIDIA GPU, beside what it can do"
	@echo "make clean            remove caches and build outputs; .venv and runs stay"

setup: $(STAMP)

# hatchling is installed first so that the distributions need no build environment each: 6 s instead of 50 s.
$(STAMP): requirements.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "prl needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=python3.12 ..." >&2; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, transformers and prl into $(VENV): a minute or more"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "hatchling>=1.27" "editables>=0.5"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -r requirements.txt
	@touch $@

$(TEST_STAMP): requirements-test.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@

vllm: setup
	$(BIN)/python plugins/engines/vllm/make_cpu.py

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports --no-cache

# Without vLLM its tests are skipped, and say why.
test: $(TEST_STAMP)
	-@$(BIN)/python plugins/engines/vllm/make_cpu.py
	$(PYTEST) -m "not slow and not gpu" tests

test-slow: $(TEST_STAMP)
	-@$(BIN)/python plugins/engines/vllm/make_cpu.py
	$(PYTEST) -m "slow and not gpu" tests

test-gpu: $(TEST_STAMP)
	$(PYTEST) -m gpu tests

demo: setup
	$(BIN)/python examples/reverse_text/demo.py

bench-peer: setup
	$(BIN)/python benchmarks/peer_trl.py

bench-overlap: setup
	$(BIN)/python benchmarks/overlap.py

bench-dataplane: setup
	$(BIN)/python benchmarks/data_plane.py

bench-generation: setup
	$(BIN)/python benchmarks/generation.py

bench-vllm: setup
	$(BIN)/python benchmarks/vllm_generation.py

bench-trainer: setup
	$(BIN)/python benchmarks/trainer_peer.py

bench-head: setup
	$(BIN)/python benchmarks/head_memory.py

bench-kernels: setup
	$(BIN)/python benchmarks/kernels.py

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find core cli plugins tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
