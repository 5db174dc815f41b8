# Two commands: `make reproduce` and `make test`. Both first make the environment; `make help` lists the rest.

VENV ?= .venv
LOCK ?= requirements/cpu.txt
CORES ?= all
WORKERS ?= 2
PORT ?= 5000

# TORCH_INDEX=https://... names an index with PyTorch's own builds (the CPU build is smaller); never required.
export VENV LOCK TORCH_INDEX PYTHON

# One thread per process: runs in parallel, instead of threads that wait for each other.
RUN := env PATH="$(abspath $(VENV))/bin:$$PATH" OMP_NUM_THREADS=1
PACKAGES := trace kernels tests workflow
SOURCES := $(wildcard $(PACKAGES))

.DEFAULT_GOAL := help
.PHONY: help setup reproduce smoke smol test test-fast lint layout format ui clean

help:  ## list the targets
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  ##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@echo "  variables: LOCK=requirements/gpu.txt  CORES=4  TORCH_INDEX=URL  PYTHON=python3.11  VENV=.venv"

setup:  ## make .venv from the pinned lock; does nothing when it is up to date
	@requirements/install.sh

reproduce: setup  ## the paper's tables and figures in miniature (config/config.yaml)
	@$(RUN) snakemake --cores $(CORES)

smoke: setup  ## the whole workflow with a few steps (config/smoke.yaml)
	@$(RUN) snakemake --cores $(CORES) --configfile config/smoke.yaml

smol: setup  ## the same workflow on SmolLM2-135M, GSM8K and HumanEval (config/smol.yaml)
	@$(RUN) snakemake --cores $(CORES) --configfile config/smol.yaml --workflow-profile workflow/profiles/smol

test: lint  ## lint and every test
	@$(RUN) python -m pytest -n $(WORKERS) --dist loadgroup

test-fast: setup  ## tests that need seconds
	@$(RUN) python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not engine and not smoke"

lint: setup layout  ## style, workflow, floors and types
	@echo "lint: ruff" && $(RUN) ruff check -q $(SOURCES) && $(RUN) ruff format -q --check $(SOURCES)
	@echo "lint: import floors" && $(RUN) PYTHONPATH=build/typing lint-imports --no-cache --no-logo
	@echo "lint: types" && $(RUN) mypy
	@echo "lint: workflow" && $(RUN) snakefmt --check Snakefile workflow && $(RUN) snakemake --lint

# trace_rl as one tree of folders whose files are links: mypy does not follow an editable install's import hook, and
# import-linter sees neither that nor linked folders.
layout:
	@rm -rf build/typing && mkdir -p build/typing && cp -rs "$(CURDIR)/trace" build/typing/trace_rl
	@cp -rs "$(CURDIR)/kernels" build/typing/trace_rl/kernels

format: setup  ## rewrite the code in the house style
	@$(RUN) ruff check -q --fix $(SOURCES) && $(RUN) ruff format -q $(SOURCES)
	@$(RUN) snakefmt Snakefile workflow

ui: setup  ## compare runs in MLflow at http://127.0.0.1:5000
	@mkdir -p results
	@$(RUN) mlflow server --host 127.0.0.1 --port $(PORT) --backend-store-uri sqlite:///results/mlflow.db \
		--default-artifact-root results/mlartifacts

clean:  ## remove results and caches; the environment stays
	rm -rf results .snakemake build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
