# Everything that is done to this project by hand or by CI. Each target sets up what it needs.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# Every process of a job imports everstep: it is compiled once, not at each of hundreds of starts.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait more than they compute: one more than the 2 cores they are made for, a file's tests in one process.
WORKERS ?= 3
SEED ?= 1

.PHONY: help setup demo test soak bench check lint types layers docs docs-reference clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: $(STAMP)  ## Make the virtual environment, once per change of pyproject.toml or constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "everstep needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[torch,dev,docs]'
	@touch $@

demo: $(STAMP)  ## Train a GPT on 2 ranks, kill its parts, and prove that nothing was lost
	@$(BIN)/everstep drill --reference --seed $(SEED) --faults worker,keeper,agent,corrupt \
	  --nproc-per-node 2 examples/gpt_ddp.py --steps 200

test: $(STAMP)  ## Run the tests, but for the long matrix. More arguments: PYTEST_ARGS='-k store'
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not soak' $(PYTEST_ARGS)

soak: $(STAMP)  ## Run the long matrix, half an hour: many kills, seeds and worlds
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m soak $(PYTEST_ARGS)

bench: $(STAMP)  ## Measure recovery, saving and memory side by side with their peers
	@$(BIN)/everstep bench recover
	@$(BIN)/everstep bench save
	@$(BIN)/everstep bench memory

check: lint types layers docs  ## Everything that can be checked without running the tests

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy
	@$(BIN)/mypy docs/generate.py

layers: $(STAMP)
	@$(BIN)/lint-imports

docs: $(STAMP)  ## Check the generated pages and build the documentation
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

docs-reference: $(STAMP)  ## Write docs/reference anew from the code
	@$(BIN)/python docs/generate.py

clean:  ## Remove what was built; the virtual environment stays
	@rm -rf docs/_build dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	  .hypothesis
