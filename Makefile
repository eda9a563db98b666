# make train, make test, make lint: each creates .venv and installs by itself when it must.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?= data
BENCHMARK ?= resnet
SCALE ?= demo
EXTRAS ?= dev,tensorboard
# Processes that share the tests; one torch thread each.
PROCESSES ?= 2
# Which demos `make demo` trains; all by default.
DEMOS ?= demo
PARALLEL := -n $(PROCESSES) --dist worksteal
ON_CPU := not demo and not gpu and not multigpu and not slurm and not container
# An unpacked bundle of `make wheelhouse` brings its packages along; a checkout takes them from the package registry.
WHEELHOUSE ?= $(if $(wildcard .git),,$(wildcard wheelhouse))
ifneq ($(strip $(WHEELHOUSE)),)
# Where nothing resolves names, PyTorch warns about every connection between ranks that it cannot name the other side.
export TORCH_CPP_LOG_LEVEL ?= ERROR
endif

.PHONY: help train test test-ids test-all slurm-test container-test images demo lint format wheelhouse clean

help:
	@echo "make train       train a demo to its target on this machine and check the log: BENCHMARK=resnet (default), one of"
	@$(PYTHON) -c 'from benchmarks import WORKLOADS; print(" " * 16, ", ".join(WORKLOADS))'
	@echo "make test        the test suite, in minutes: one case of each kind; PROCESSES=2 (default) share it"
	@echo "make test-ids    whether the tests have the same ids at another time and under another hash seed"
	@echo "make test-all    all of it, in hours: every size and type of the kernels, every mutation of logs and registries"
	@echo "make demo        the tests that train each demo to its target"
	@echo "make slurm-test  the tests that need a Slurm controller"
	@echo "make container-test  the tests that build an image of the suite and run it; root, podman, and a wheelhouse"
	@echo "make images      the images that need no CUDA compiler, and of the others the stages before it; half an hour"
	@echo "make lint        ruff, mypy, shellcheck and hadolint"
	@echo "make wheelhouse  a bundle for a site without a network: docs/air_gapped.md"

$(VENV)/.installed: pyproject.toml constraints.txt
ifeq ($(strip $(WHEELHOUSE)),)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
else
	PYTHON=$(PYTHON) scripts/wheelhouse.sh install $(WHEELHOUSE) $(VENV)
endif
	touch $@

# DATA is text for the shell alone: make's targets cannot hold every path, and its variables have a grammar of their own.
train: export PREPARED := $(value DATA)/$(BENCHMARK)-$(SCALE)
train: $(VENV)/.installed
	test -e "$$PREPARED-raw/SYNTHETIC" || \
	  $(BIN)/mlperf-suite generate benchmark=$(BENCHMARK) scale=$(SCALE) --raw-dir="$$PREPARED-raw"
	test "$$PREPARED/manifest.json" -nt "$$PREPARED-raw/SYNTHETIC" || \
	  $(BIN)/mlperf-suite prepare benchmark=$(BENCHMARK) --raw-dir="$$PREPARED-raw" --data-dir="$$PREPARED"
	$(BIN)/mlperf-suite train benchmark=$(BENCHMARK) scale=$(SCALE) \
	  "$$($(BIN)/python -m common.config.override data_dir "$$PREPARED")"

test test-all: export OMP_NUM_THREADS := 1

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m "$(ON_CPU) and not slow"

test-ids: $(VENV)/.installed
	$(BIN)/python -m tests.collected_twice

# Twice: with slow tests asked for, those that draw their cases draw thousands instead of a sample.
test-all: test
	$(BIN)/python -m pytest $(PARALLEL) -m "$(ON_CPU) and slow" --timeout=3600

demo: $(VENV)/.installed
	$(BIN)/python -m pytest tests/demos $(PARALLEL) -m "$(DEMOS)" --durations=3

slurm-test: $(VENV)/.installed
	$(BIN)/python -m pytest tests/slurm -m slurm

container-test: $(VENV)/.installed
	$(BIN)/python -m pytest tests/containers -m "container and not slow" --durations=0

images: $(VENV)/.installed
	$(BIN)/python -m pytest tests/containers -m "container and slow" --durations=0

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck scripts/*.sh scripts/run.sub docker/*.sh .ci/run
	$(BIN)/hadolint docker/Dockerfile

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheelhouse:
	PYTHON=$(PYTHON) EXTRAS=$(EXTRAS) scripts/wheelhouse.sh build

clean:
	rm -rf $(VENV) build dist *.egg-info
