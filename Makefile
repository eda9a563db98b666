# make train, make test, make lint: each creates .venv and installs by itself when it must.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?= data
SCALE ?= demo

.PHONY: help train test demo lint format clean

help:
	@echo "make train   train the ResNet-50 demo to its target on this machine and check the log"
	@echo "make test    the test suite"
	@echo "make demo    the tests that train each demo to its target"
	@echo "make lint    ruff and mypy"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,tensorboard]'
	touch $@

$(DATA)/raw-digits/STAND_IN: | $(VENV)/.installed
	$(BIN)/mlperf-suite generate benchmark=resnet scale=$(SCALE) --raw-dir $(DATA)/raw-digits

$(DATA)/resnet-digits/manifest.json: $(DATA)/raw-digits/STAND_IN
	$(BIN)/mlperf-suite prepare benchmark=resnet --raw-dir $(DATA)/raw-digits --data-dir $(DATA)/resnet-digits

train: $(VENV)/.installed $(DATA)/resnet-digits/manifest.json
	MLPERF_DATA_DIR=$(DATA) $(BIN)/mlperf-suite train benchmark=resnet scale=$(SCALE)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not demo and not gpu and not multigpu and not slurm"

demo: $(VENV)/.installed
	$(BIN)/python -m pytest -m demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
