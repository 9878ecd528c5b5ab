# make demo   a picture and a clip through the actors, on this machine
# make test   the tests
# make lint   format, lint and types
# make bench  what the pipeline costs over one process
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'CosmoRay needs Python 3.11 or later')"
	$(PYTHON) -m venv $(VENV)
	# torch first and by itself: the pin takes the build for machines with no GPU
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/pipeline.py

clean:
	rm -rf $(VENV) out
