# Front door for people: every target installs what it needs into .venv, once.
#   make demo                        ENGINE=cpu|gpu overrides which engine is installed
#   make test ARGS="-k directory"    ARGS goes to the command behind the target
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The GPU engine where an NVIDIA driver answers.
ENGINE ?= $(shell nvidia-smi --list-gpus >/dev/null 2>&1 && echo gpu || echo cpu)
INSTALLED := $(VENV)/installed-$(ENGINE)

.PHONY: help install demo serve test cluster-test lint bench gpu-check clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Install kvroute, an engine and all tools into .venv
	@echo "install: $(VENV) is up to date, engine $(ENGINE)" >&2

$(INSTALLED): pyproject.toml .ci/install.sh .ci/lock-cpu.txt .ci/lock-gpu.txt
	@.ci/install.sh $(VENV) $(ENGINE)

demo: $(INSTALLED) ## Run the demo batch, with cache-aware routing and without, and compare
	@echo "demo: running the demo batch on two workers" >&2
	@$(BIN)/kvroute demo $(ARGS)

serve: $(INSTALLED) ## Answer OpenAI clients on port 8000, with two workers and the built-in model
	@echo "serve: starting two workers" >&2
	@$(BIN)/kvroute serve --model smollm2 --workers 2 $(ARGS)

test: $(INSTALLED) ## Run all tests, those with a real store, Ray and vLLM included
	@echo "test: running all tests" >&2
	@$(BIN)/python -m pytest $(ARGS)

cluster-test: $(INSTALLED) ## Bring up cluster.yaml on machines of loopback, lose a node, run jobs of Ray
	@echo "cluster-test: needs openssh-server and rsync" >&2
	@$(BIN)/python -m pytest --cluster $(ARGS)

lint: $(INSTALLED) ## Check style, format and types
	@echo "lint: checking style, format and types" >&2
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy shared router worker

bench: $(INSTALLED) ## Run the benchmarks; they print one JSON line each
	@echo "bench: running tests/bench" >&2
	@for file in tests/bench/bench_*.py; do \
	  test -e "$$file" || { echo "bench: tests/bench holds no benchmark" >&2; exit 1; }; \
	  module=$${file%.py}; $(BIN)/python -m "$${module//\//.}" --json $(ARGS); \
	done
	@for name in batch blocks decision directory http planner streams tokenise transport; do $(BIN)/kvroute bench $$name --json; done

gpu-check: ## On a machine with a GPU: run the real-engine tests and the demo there, print one report
	@.ci/gpu_check.sh $(VENV)

clean: ## Remove .venv, caches and build results
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
