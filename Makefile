# Every target sets up what it needs on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint proto clean
.DELETE_ON_ERROR:

$(READY): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(READY)   ## train the digits through a parameter server
	$(BIN)/python examples/parameter_server.py --plot out/parameter_server.png

test: $(READY)   ## the tests that every change must pass
	$(BIN)/python -m pytest

lint: $(READY)   ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/lint && ln -sfn $(CURDIR) $(VENV)/lint/gradwire
	$(BIN)/python tools/list_packages.py

proto: $(READY)  ## regenerate proto/v1 from the .proto files
	$(BIN)/python -m gradwire.proto.generate

clean:
	rm -rf $(VENV) build dist out *.egg-info
