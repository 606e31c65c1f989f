# Everything a developer or a visitor runs.  Needs make and Python >= 3.11, nothing else.

.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime

# The first interpreter on PATH that is new enough; `make PYTHON=/path/to/python3.12 ...` overrides.
NEW_ENOUGH := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	"$$python" -c "$(NEW_ENOUGH)" >/dev/null 2>&1 && command -v "$$python" && break; done)

.PHONY: help demo test check bench gpu soak fuzz docs format clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(RUNTIME)  ## Stream features of a small vision transformer to two processes, and check them.
	@$(BIN)/asyncvmm demo $(ARGS)

test: check  ## Run formatting, lint, types, import contracts and all tests.
	@$(BIN)/pytest $(ARGS)

check: $(STAMP)  ## Run everything of `make test` but the tests.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)  ## Compare transports for some minutes, and write a report: ARGS="--loop both".
	@mkdir -p build
	@$(BIN)/python -m benchmarks run --json build/bench.json $(ARGS)
	@$(BIN)/python -m benchmarks report build/bench.json

gpu: $(STAMP)  ## Run the tests that need a CUDA device.
	@$(BIN)/pytest -m gpu $(ARGS)

soak: $(STAMP)  ## Stream, kill, cancel and fuzz for minutes or hours: ARGS="--kills 500 --report OUT.json".
	@$(BIN)/python -m tests.soak $(ARGS)

fuzz: $(STAMP)  ## Send rubbish to both ends for as long as asked (ARGS=--help says how).
	@$(BIN)/python -m tests.process.fuzz $(ARGS)

docs: $(STAMP)  ## Build the documentation into site/, strictly.
	@$(BIN)/python docs/tools/wire_page.py
	@$(BIN)/python docs/tools/command_line_page.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

format: $(STAMP)  ## Format the code and sort its imports.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## Remove the virtual environment and everything the tools cached.
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -rf build dist site src/*.egg-info
	@find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python >= 3.11 with venv was found on PATH." >&2; \
		echo "Install one (Debian: python3 python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi
	@if ! "$(PYTHON)" -c "$(NEW_ENOUGH)" 2>/dev/null; then \
		echo "$(PYTHON) is older than Python 3.11 or has no venv; name another: make PYTHON=..." >&2; \
		exit 1; \
	fi
	@echo "Making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# What a visitor needs to see it run; the tools of `make test` take longer to install.
# --no-compile: most of what torch brings is never imported, and compiling it takes longer than the
# rest of the installation; Python compiles the modules that are.
$(RUNTIME): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing asyncvmm into $(VENV) (the first time takes some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e . numpy  # without numpy, torch warns of that
	@touch $@

$(STAMP): $(RUNTIME)
	@echo "Installing asyncvmm and its tools into $(VENV) (the first time takes some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[dev]'
	@touch $@
