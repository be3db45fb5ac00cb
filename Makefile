# Everything runs from .venv in this directory, which the first target that needs it makes:
# all that is needed is make and Python 3.11 or newer. `make help` lists the targets.
# `make test PYTHON=python3.13` makes .venv anew if it has another version.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
MUTANTS := .venv-mutants
MOTO := .venv-moto
SITE := .venv-docs
MLFLOW := .venv-mlflow
FLOWER := .venv-flower
JUPYTER := .venv-jupyter
VERSION := -c 'import sys; print(*sys.version_info[:2], sep=".")'
# Only where PYTHON was named: whether .venv has another version.
OTHER := $(if $(filter-out file,$(origin PYTHON)),$(shell test ! -x $(BIN)/python \
	|| test "$$($(BIN)/python $(VERSION))" = "$$("$(PYTHON)" $(VERSION))" || echo another-version))
BASE ?= origin/main
ARGS ?=
SEEDS ?= 1000
MINUTES ?= 60
JOBS ?= 3  # one more than two cores: a test now and then waits for another process
PYTEST := -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE  # tests start many processes, which would all compile our modules

.DEFAULT_GOAL := help
.PHONY: help demo test test-changed test-full test-peers fuzz faults soak mutants lint types proto bench docs constraints sbom release-check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.run  ## a small federation on this machine: make demo ARGS="--rounds 10"
	@$(BIN)/fedpareto demo $(ARGS)

test: $(VENV)/.dev  ## the tests, lint and types among them: make test ARGS="tests/federation/test_vectors.py -x"
	@$(BIN)/python $(PYTEST) $(ARGS)

test-changed: $(VENV)/.dev  ## tests marked `full` that concern what changed since BASE: make test-changed BASE=main
	@$(BIN)/python tools/changed_tests.py --base "$(BASE)" -- $(PYTEST) $(ARGS)

test-full: $(VENV)/.full $(MOTO)/.installed $(SITE)/.installed $(MLFLOW)/.installed $(FLOWER)/.installed $(JUPYTER)/.installed  ## all tests, those that take long included
	@$(BIN)/python $(PYTEST) -m "full or not full" $(ARGS)

test-peers: $(PEERS)/.installed  ## our rules against other libraries, and all searches for what breaks their bounds
	@$(PEERS)/bin/python -m pytest -m "full or not full" --confcutdir tests/peers tests/peers \
		tests/federation/aggregation/test_robustness_bounds.py tests/federation/aggregation/test_non_conflicting.py $(ARGS)

fuzz: $(VENV)/.dev  ## 10,000 inputs for each parser, others each time: make fuzz ARGS="-k gram"
	@$(BIN)/python -m pytest --hypothesis-profile fuzz --timeout 3600 -m "full or not full" \
		tests/coordinator/services/test_fuzz.py tests/worker/test_fuzz.py tests/federation/test_fuzz_parsers.py \
		tests/federation/test_fuzz_messages.py $(ARGS)

faults: $(VENV)/.dev  ## schedules of crashes and losses on one thread: make faults SEEDS=10000; one again: ARGS="--seed 7"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.simulated --seeds $(SEEDS) --nice 19 $(ARGS)

soak: $(VENV)/.dev  ## several coordinators while processes die, freeze and lose their lines: make soak MINUTES=60
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

mutants: $(VENV)/.dev $(MUTANTS)/.installed  ## small changes of the code that no test notices: make mutants MODULE=qp ARGS="--count 25"
	@$(MUTANTS)/bin/python tools/mutants.py $(MODULE) $(ARGS)

lint: $(VENV)/.dev  ## formatting, lint, types and import rules
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev  ## the types of the tests; `make lint` checks those of everything else
	@$(BIN)/mypy tests

proto: $(VENV)/.dev  ## write federation/v1 anew from proto/
	@$(BIN)/python proto/generate.py

bench: $(VENV)/.dev  ## every scenario of benchmarks/bench.py, one after the other: make bench ARGS=--quick
	@$(BIN)/python benchmarks/bench.py all $(ARGS)

docs: $(SITE)/.installed  ## the documents as a site, to read without a server: build/docs/site/index.html
	@$(SITE)/bin/python tools/docs_site.py

constraints:  ## write constraints.txt anew: the newest versions that pyproject.toml allows
	@rm -rf build/constraints
	@$(PYTHON) -m venv build/constraints
	@tools/install.sh build/constraints '.[torch,dev,examples,tracking]'
	@{ sed -n '/^#/p' constraints.txt; \
	   build/constraints/bin/python -m pip freeze --all --exclude fedpareto --exclude pip \
	   | grep -Ev '^(cuda|nvidia|triton)'; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@rm -rf build/constraints

sbom: $(VENV)/.dev  ## a software bill of materials (CycloneDX) of what .venv has installed: build/fedpareto.cdx.json
	@mkdir -p build
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file build/fedpareto.cdx.json $(ARGS) $(BIN)/python

release-check: $(VENV)/.dev  ## the release checklist of CONTRIBUTING.md, without publishing anything
	@$(BIN)/python tools/release_check.py $(ARGS)

clean:  ## remove .venv and its siblings, caches and build output (./fedpareto-demo stays)
	@rm -rf $(VENV) $(PEERS) $(MUTANTS) $(MOTO) $(SITE) $(MLFLOW) $(FLOWER) $(JUPYTER) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What running needs (.run), and on top of it what developing needs (.dev).
.PHONY: another-version
$(VENV)/.run: pyproject.toml constraints.txt $(OTHER)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name yours: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing into $(VENV); PyTorch is large, the first time takes some minutes." >&2
	@$(if $(OTHER),rm -rf $(VENV))
	@"$(PYTHON)" -m venv $(VENV)
	@tools/install.sh $(VENV) -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@tools/install.sh $(VENV) -c constraints.txt -e '.[torch,dev]'
	@touch $@

# What the long tests of examples need besides.
$(VENV)/.full: $(VENV)/.dev
	@tools/install.sh $(VENV) -c constraints.txt -e '.[torch,dev,examples,tracking]'
	@touch $@

# Libraries to compare ours with, whose pins may clash with constraints.txt.
$(PEERS)/.installed: pyproject.toml
	@"$(PYTHON)" -m venv $(PEERS)
	@tools/install.sh $(PEERS) -e '.[torch,peers]'
	@touch $@

# A second S3 service for the tests, which needs older packages than constraints.txt has.
$(MOTO)/.installed: pyproject.toml
	@"$(PYTHON)" -m venv $(MOTO)
	@tools/install.sh $(MOTO) -e '.[moto]'
	@touch $@

# What makes the site of the documents.
$(SITE)/.installed: pyproject.toml
	@"$(PYTHON)" -m venv $(SITE)
	@tools/install.sh $(SITE) -e '.[docs]'
	@touch $@

# A tracking server for the tests: the sink itself needs MLflow's client alone.
$(MLFLOW)/.installed: pyproject.toml
	@"$(PYTHON)" -m venv $(MLFLOW)
	@tools/install.sh $(MLFLOW) -e '.[mlflow]'
	@touch $@

# Flower, whose pins clash with constraints.txt, and this project for its side of an external trainer.
$(FLOWER)/.installed: pyproject.toml
	@"$(PYTHON)" -m venv $(FLOWER)
	@tools/install.sh $(FLOWER) -e '.[torch,flower]'
	@touch $@

# A notebook's kernel, and what the notebooks of the documents need, which their first lines name.
$(JUPYTER)/.installed: pyproject.toml constraints.txt
	@"$(PYTHON)" -m venv $(JUPYTER)
	@tools/install.sh $(JUPYTER) -c constraints.txt -e '.[torch,experiments,jupyter]'
	@touch $@

# What changes the code; .venv runs the tests.
$(MUTANTS)/.installed: pyproject.toml
	@"$(PYTHON)" -m venv $(MUTANTS)
	@tools/install.sh $(MUTANTS) -e '.[mutants]'
	@touch $@
