# `make demo` and `make test` are all that a fresh machine needs: they create .venv themselves.
PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

BIN   := .venv/bin
STAMP := .venv/.installed
PIP   := $(BIN)/python -m pip --disable-pip-version-check $(if $(V),,-qq)

# The documentation's theme would otherwise advertise its successor.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test gpu check format docs bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18
	@echo '  variables: PYTHON (interpreter for .venv), WORKERS (test processes), ARGS (passed on), V=1 (show pip)'

$(STAMP): pyproject.toml constraints.txt
	@echo "installing torch, the tools and deltafuse into .venv (minutes on a slow network)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the tools need Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## train a small language model on the CPU and generate from it (at most some minutes)
	$(BIN)/python examples/train_lm.py $(ARGS)

# One thread a worker: torch would otherwise start one a core in every process.
test: $(STAMP) ## tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu tests/emulated -n $(WORKERS) $(ARGS)

gpu: $(STAMP) ## tests that need an NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu $(ARGS)

check: $(STAMP) ## style, types, layers, documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/cpu/test_layering.py
	$(BIN)/mkdocs build --strict --quiet

format: $(STAMP) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(STAMP) ## time the ops: make bench ARGS="--help"
	$(BIN)/deltafuse bench $(ARGS)

clean: ## remove everything that make created
	rm -rf .venv site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
