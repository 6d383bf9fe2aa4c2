# make run [CONFIG=configs/smoke.yaml]   `gradwire run`: the experiment, end to end; PROFILE=container: in the image
# make image [VARIANT=cuda] [MIRROR=URL]  the container image, from what is locked
# make image-lock [MIRROR=URL]           lock again what goes into the images
# make test [WORKERS=2]                  the tests
# make test-newest [NEWEST=torch==2.14.1]  the tests with the torch that a plain install brings, in .venv-torch-2.14.1: 6.6 GB
# make test-faults [ONLY=expression]     faults, each injected from outside, and the rerun after each: a table
# make test-sweep                        full products of which `make test` takes a selection
# make test-full                         wheel, browser, documentation, examples, links, every command of the pages
# make test-slurm [ONLY=expression]      the smoke experiment on a Slurm of its own; needs root and Debian's slurm-wlm, munge
# make test-container                    the smoke experiment in the image, which is built for it
# make nightly                           all of these, one after another
# make train ARGS="--data_path ... --output_dir ..." [RANKS=2]   one run by hand: what is here, TensorBoard, its log, shown and kept
# make gpu [DEVICE=cpu] [PARTS="codecs model"]     what claims CUDA, checked and timed on a GPU: results/gpu
# make tensorboard [RESULTS=results]     TensorBoard over all runs, on a free port
# make lint                              ruff, mypy, pyright, import-linter, snakefmt, codespell, snakemake --lint
# make docs                              the documentation into site/, strictly: warnings and broken links are errors
PYTHON ?= python3
CONFIG ?= config.yaml
TORCH ?= torch==2.13.0
NEWEST ?= torch==2.14.1
VENV ?= .venv
LOCKED ?=
UV ?= $(shell command -v uv)
VARIANT ?= cpu
CORES ?=
RANKS ?= 2
WORKERS ?= 2
RESULTS ?= results
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_DOCS := $(VENV)/.ready-docs
READY_TITAN := .titan/.ready

.PHONY: run train gpu tensorboard image image-lock kernels test test-newest test-faults test-sweep test-full nightly test-slurm test-container lint format docs schema lock

run: $(READY)
	@$(BIN)/gradwire run $(CONFIG) $(if $(CORES),--cores $(CORES)) $(if $(PROFILE),--profile $(PROFILE))

train: SHELL := /bin/bash -o pipefail
train: $(READY)
	@$(BIN)/gradwire doctor
	@mkdir -p logs
	@log=logs/train-$$(date +%Y%m%d-%H%M%S).log; echo "log          $$log"; \
	$(BIN)/gradwire launch --tensorboard --world_size $(RANKS) -- train $(ARGS) 2>&1 | tee --ignore-interrupts $$log

gpu: $(READY_DEV)
	@PYTHON=$(BIN)/python $(if $(DEVICE),DEVICE=$(DEVICE)) $(if $(SIZE),SIZE=$(SIZE)) benchmarks/gpu.sh $(PARTS)

tensorboard: $(READY)
	$(BIN)/tensorboard --logdir $(RESULTS) --port 0

image: $(READY)
	@$(BIN)/python containers/build.py --variant $(VARIANT) $(if $(MIRROR),--mirror $(MIRROR))

image-lock: $(READY)
	$(BIN)/python containers/lock.py --torch $(TORCH:torch==%=%) $(if $(MIRROR),--mirror $(MIRROR))

# Several files at once: most tests use one core. Fixtures of a file are made once (loadfile).
test: kernels
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 --junitxml=logs/test.xml

# Compiled once, before several workers and their ranks would each do it.
kernels: $(READY_DEV)
	$(BIN)/python tests/helpers/compile_kernels.py

test-newest:
	$(MAKE) test VENV=.venv-$(subst ==,-,$(NEWEST)) TORCH=$(NEWEST) LOCKED=--no-deps

test-faults: $(READY_DEV)
	$(BIN)/python -m pytest -m faults $(if $(ONLY),-k "$(ONLY)") --durations=5 tests/faults

test-sweep: kernels
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m sweep
	TEST_RANKS=processes $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/comm/collectives

test-full: $(READY_DOCS) $(READY_TITAN)
	$(BIN)/python -m pytest -m full

# The image is built while nothing else runs; what fails does not keep the rest from running.
nightly: $(READY_DOCS)
	$(MAKE) --keep-going test-sweep test-newest test-full test-container test-slurm test-faults

# After the same experiment without Slurm, which has nothing to do if it ran already.
test-slurm: $(READY_DEV)
	$(BIN)/snakemake --cores all --quiet --configfile configs/smoke.yaml
	$(BIN)/python -m pytest -m slurm $(if $(ONLY),-k "$(ONLY)") tests/slurm

test-container: $(READY_DEV) image
	$(BIN)/python -m pytest -m container tests/container

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini
	$(BIN)/python tests/checkers/pages.py build/pages
	$(BIN)/mypy --config-file tests/checkers/mypy.ini examples build/pages
	$(BIN)/basedpyright --project tests/checkers --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tests/checkers/tested.py
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/codespell
	$(BIN)/snakemake --lint

format: $(READY_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow

# torch first, by version (its CPU and CUDA builds cannot share one hash), then everything else by hash: with uv where it
# is installed, else with pip; UV= takes pip. Both refuse a lock that lacks what a package needs, except with
# LOCKED=--no-deps: another torch asks for other versions. An import writes its bytecode itself.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python --override requirements.overrides,$(PIP))
BY_HASH = $(INSTALL) $(LOCKED) --require-hashes

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(BY_HASH) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# What tests and lint need as well.
$(READY_DEV): $(READY) requirements-dev.lock
	$(BY_HASH) -r requirements.lock -r requirements-dev.lock
	touch $@

docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "$(CURDIR)/site/index.html"

$(READY_DOCS): $(READY_DEV) requirements-docs.lock
	$(INSTALL) --require-hashes -r requirements-docs.lock
	touch $@

# Apart from .venv: torchtitan asks for an older datasets than gradwire, and for wandb, without which tests run.
$(READY_TITAN): $(READY) requirements-titan.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .titan --require-hashes -r requirements-titan.lock
	touch $@

schema: $(READY)
	$(BIN)/python -c "import json; from gradwire.bench.config import json_schema; print(json.dumps(json_schema(), indent=2))" \
	    > workflow/schemas/config.schema.json

LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "make lock" --no-emit-package torch --override requirements.overrides
WITHOUT = $$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' $(1))

lock:
	$(LOCK) requirements.in -o requirements.lock
	$(LOCK) --constraint requirements.lock $(call WITHOUT,requirements.lock) requirements-dev.in -o requirements-dev.lock
	$(LOCK) --constraint requirements.lock --constraint requirements-dev.lock requirements-docs.in -o requirements-docs.lock
	$(LOCK) --override requirements-titan.overrides --constraint requirements.lock --constraint requirements-dev.lock \
	    $(call WITHOUT,requirements.lock requirements-dev.lock) requirements-titan.in -o requirements-titan.lock
