# `make demo` and `make test` do all the set-up themselves: they need Python 3.11 or newer and a C compiler.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench soak clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
MINUTES ?= 5

help:
	@echo "make demo    kill a rank of a running training and see that nothing is lost"
	@echo "make test    all tests"
	@echo "make lint    format, style, floors, types"
	@echo "make bench   the benchmarks, one after the other, into BENCHMARKS.md (JSON in $(VENV)/bench)"
	@echo "make soak    a storm of faults for MINUTES=$(MINUTES) minutes"
	@echo "make clean   removes $(VENV)"

demo: $(VENV)/.package
	@$(BIN)/resilient demo

test: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

bench: $(VENV)/.dev
	@mkdir -p $(VENV)/bench
	@for name in recovery overhead startup leak; do \
		$(BIN)/python tests/benchmarks/$$name.py --json $(VENV)/bench/$$name.json; \
	done
	@$(BIN)/python tests/benchmarks/gather.py $(VENV)/bench/{recovery,overhead,startup,leak}.json

soak: $(VENV)/.dev
	@$(BIN)/python tests/process/soak.py --minutes $(MINUTES)

clean:
	rm -rf $(VENV)

# ---- the virtual environment: made once, brought up to date when what it holds has changed ----

$(VENV)/.package: constraints.txt pyproject.toml
	@command -v cc >/dev/null || command -v gcc >/dev/null || { \
		echo "A C compiler is needed (cc or gcc), for example from the packages build-essential or gcc." >&2; \
		exit 1; }
	@if ! $(BIN)/python -c pass 2>/dev/null; then \
		for python in $(PYTHON) python3 python3.12 python3.11 python3.13 python3.14; do \
			if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				echo "Making $(VENV) with $$("$$python" --version)"; \
				"$$python" -m venv --clear $(VENV) && break; \
			fi; \
		done; \
		$(BIN)/python -c pass 2>/dev/null || { \
			echo "Python 3.11 or newer is needed, with its venv module; name it with: make PYTHON=... $(MAKECMDGOALS)" >&2; \
			exit 1; }; \
	fi
	@echo "Installing torch: some gigabytes, some minutes"
	@$(PIP) install --upgrade "pip>=25.1"
	@$(PIP) install -c constraints.txt torch numpy setuptools wheel
	@echo "Installing DeepSpeed, which is built here"
	@$(PIP) install -c constraints.txt --no-build-isolation deepspeed
	@$(PIP) install -c constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "Installing what the tests and linters need"
	@$(PIP) install -c constraints.txt --group dev
	@touch $@
