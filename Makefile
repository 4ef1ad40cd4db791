# make demo      train a small model with a whole swarm on this machine (about 8 minutes, set-up included)
# make test      lint, types and the fast tests
# make test-all  the slow tests too: real processes, kill -9
# make clean     remove the virtual environment, caches and runs
#
# Needs Python 3.11 or newer. On Linux without a GPU this saves gigabytes:
#   make demo TORCH_INDEX=<the index of CPU wheels that PyTorch's site names>

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INDEX ?=
# Without --no-compile, pip would compile all of torch; the little that is used is compiled when it is first loaded.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# pip repeats some harmless lines about places it does not look at; everything else it says is shown.
QUIET := 2> >(grep -v 'Location .* is ignored' >&2)
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: demo test test-slow test-all clean setup setup-dev

demo: $(VENV)/.ready
	$(BIN)/iota up recipes/demo.toml --set folder=$(DEMO) $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/mypy --no-error-summary
	$(BIN)/pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.ready-dev
	$(BIN)/pytest -m slow $(ARGS)

test-all: test test-slow

setup: $(VENV)/.ready

setup-dev: $(VENV)/.ready-dev

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "iota needs Python 3.11 or newer; none was found. Give one: make PYTHON=/path/to/python3" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(BIN)/python
	@echo "installing what iota needs into $(VENV)"
	@$(PIP) -e '.[plots]' $(QUIET)
	@$(BIN)/python -c 'import torch, aiohttp, nacl'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml | $(BIN)/python
	@echo "installing what iota and its tests need into $(VENV)"
	@$(PIP) -e '.[dev]' $(QUIET)
	@touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) runs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
