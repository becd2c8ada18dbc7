# Everyday targets. `make run` and `make test` do everything on a fresh machine.
SHELL := bash
PLATFORM ?= cpu
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-$(PLATFORM)
JOB ?= examples/quickstart.toml
ROOM_GB ?= 5# of disk for .venv; 3.7 are used for PLATFORM=cpu

.PHONY: setup images engine run test test-unit lint bench chaos model docs proto clean

setup: $(STAMP)

$(STAMP): requirements/$(PLATFORM).lock requirements/dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onbeat needs Python 3.11 or newer: make setup PYTHON=/path/to/python3")'
	test -x $(BIN)/pip || $(PYTHON) -I onbeat/room.py .venv $(ROOM_GB) "the packages in requirements/$(PLATFORM).lock"
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --no-deps -r requirements/$(PLATFORM).lock -r requirements/dev.lock \
		|| { echo "pip could not install the pinned packages. If it finds no torch==...+cpu, add PyTorch's CPU wheel index" \
		"to pip's sources (PIP_EXTRA_INDEX_URL; pytorch.org, 'Get Started', names it) and repeat."; exit 1; }
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

run: setup
	$(BIN)/onbeat run $(JOB)

# Three container images of PLATFORM; what they are built from is in docs/deploy.md.
images:
	deploy/docker/build-images.sh $(PLATFORM)

# Docker and its compose plugin, installed and started where there are none and where this may be done.
engine: setup
	deploy/docker/engine.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: setup
	$(BIN)/pytest

test-unit: setup
	$(BIN)/pytest tests/unit

bench: setup
	for name in periodic_vs_sync vs_trl rollout_overhead shared_prompt tri_model gac_staleness delta_codec weights_update weights_pull weights_relay ledger_throughput appendfsync audit_overhead recovery dashboard_api dashboard_page container_start; do \
		PYTHONPATH="$(CURDIR)" $(BIN)/python benchmarks/$$name.py || exit 1; done

# Minutes of seeded faults (processes killed and paused, bad networks); the default tests have a few seconds of it.
# The protocol's real scripts, explored in every order: larger bounds than in the tests.
model: setup
	$(BIN)/python -m tests.model

chaos: setup
	PYTHONPATH="$(CURDIR)" $(BIN)/python benchmarks/chaos.py

# The references from the code, then the site into site/.
docs: setup
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Generated code is committed, so users need no protoc.
proto: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. \
		proto/onbeat/weights/v1/weights.proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --mypy_out=. proto/onbeat/rollout/v1/rollout.proto

clean:
	rm -rf .venv site
