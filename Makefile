# Everyday targets. `make run` and `make test` do everything on a fresh machine.
SHELL := bash
unexport PYTHONDONTWRITEBYTECODE# else each of the many processes that tests start would compile the sources anew
IMAGE_PLATFORM := $(or $(PLATFORM),cpu)
# That of .venv, if it is there, also if its set-up was interrupted.
PLATFORM := $(or $(PLATFORM),$(patsubst .venv/.setup-%,%,$(firstword $(wildcard .venv/.setup-*))),$(patsubst .venv/.for-%,%,$(firstword $(wildcard .venv/.for-*))),cpu)
PYTHON ?= python3
OWN_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard .venv/.setup-*)),.venv/bin/python,$(PYTHON))
BIN := .venv/bin
STAMP := .venv/.setup-$(PLATFORM)
DIST ?= dist
# Every file that names the version; it stands in the first one, and the others cannot compute.
VERSIONED := onbeat/__init__.py .env $(addprefix docs/,deploy.md install.md kubernetes.md platforms.md) $(wildcard deploy/kubernetes/overlays/*/kustomization.yaml)
JOB ?= examples/quickstart.toml
PARTS ?=# of gpu-check; all if empty
RESULTS ?=# folder for what gpu-check finds; if empty benchmarks/results, and none on a CPU
# Tests are chosen by their markers, which pyproject.toml describes.
QUICK := not (slow or alone or rare or container or browser or gpu)
HERE := not (rare or container or browser or gpu)# needs no container engine, no browser and no second environment
SIDE_BY_SIDE := $(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
REHEARSAL := .venv-gpu-check
PYTHON312 ?= $(shell requirements/find-python.sh 3.12)
OTHER_PYTHON ?= $(or $(shell requirements/find-python.sh 3.13),$(PYTHON312))
OTHER := .venv-other-python
NEEDED_GB ?= $(if $(filter cuda,$(PLATFORM)),12,5)# of disk for .venv; 3.7 are used for PLATFORM=cpu

# ISA=avx2, ISA=avx512 or ISA=avx512_bf16: use no newer instructions than these, to imitate an older processor.
ISA ?=
ifeq ($(ISA),avx2)
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export MKL_ENABLE_INSTRUCTIONS := AVX2
else ifeq ($(ISA),avx512)
export ATEN_CPU_CAPABILITY := avx512
export ONEDNN_MAX_CPU_ISA := AVX512_CORE
export MKL_ENABLE_INSTRUCTIONS := AVX512
else ifeq ($(ISA),avx512_bf16)
export ATEN_CPU_CAPABILITY := avx512
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16
export MKL_ENABLE_INSTRUCTIONS := AVX512_E3
else ifneq ($(ISA),)
$(error ISA=$(ISA): use avx2, avx512 or avx512_bf16)
endif

.PHONY: setup images engine wheel run check test test-all test-rest test-avx2 test-other-python lint bench gpu-check gpu-check-wheels gpu-check-rehearsal chaos model docs proto clean version

setup: $(STAMP)

# A new lock is installed into what is there. What another platform or an interrupted set-up left is not kept.
$(STAMP): requirements/$(PLATFORM).lock requirements/dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onbeat needs Python 3.11 or newer: make setup PYTHON=/path/to/python3")'
	test -e $@ || $(PYTHON) -I onbeat/machine/disk_space.py .venv $(NEEDED_GB) "the packages in requirements/$(PLATFORM).lock"
	test -e $@ || $(PYTHON) -m venv --clear .venv
	rm -f $@
	touch .venv/.for-$(PLATFORM)
	$(BIN)/python requirements/install.py requirements/$(PLATFORM).lock requirements/dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

run: setup
	$(BIN)/onbeat run $(JOB)

# The next version, everywhere: make version VERSION=0.2.0.
version:
	test -n "$(VERSION)" || { echo "which one? make version VERSION=0.2.0"; exit 1; }
	old=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' onbeat/__init__.py) && sed -i "s/\b$${old//./\\.}\b/$(VERSION)/g" $(VERSIONED)

# Three container images of PLATFORM, by default cpu; what they are built from is in docs/deploy.md.
images:
	deploy/docker/build-images.sh $(IMAGE_PLATFORM)

# Docker and its compose plugin, installed and started where there are none and where this may be done.
engine: setup
	deploy/docker/engine.sh

# A release, in DIST: the wheel, and what docs/install.md uses with it.
wheel: setup
	rm -rf build && mkdir -p $(DIST)
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) .
	cp requirements/cpu.lock requirements/cuda.lock requirements/install.py examples/quickstart.toml $(DIST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# What to run before each commit: minutes.
check: lint
	$(SIDE_BY_SIDE) -m "$(QUICK)"

# Everything that proves the product on this machine: real Redis, gRPC, PyTorch and vLLM.
test: setup
ifdef TESTS
	$(BIN)/pytest $(TESTS)
else
	$(SIDE_BY_SIDE) -m "$(HERE) and not alone"
	$(BIN)/pytest -m "$(HERE) and alone"
endif

# Also containers, pods, a browser, storms, an older processor, another Python, and the check for GPUs without one.
test-all: lint test test-rest test-other-python gpu-check-rehearsal

# What test-all has besides `test` in the same environment.
test-rest: setup
	$(SIDE_BY_SIDE) -m "rare and not alone and not gpu"
	$(BIN)/pytest -m "(rare or container or browser) and alone"
	if grep -q avx512f /proc/cpuinfo; then $(MAKE) test-avx2; fi

# The engines' numbers and the quick start as on a processor that has AVX2 alone; such a one has just done the same.
test-avx2:
	$(MAKE) test ISA=avx2 TESTS='tests/integration/rollout/test_engines.py tests/e2e/test_onbeat_run.py -k "fresh or logprobs or quick_start"'

# The packages of the lock and the tests of `check`, on another Python.
test-other-python: $(OTHER)/.setup
	$(OTHER)/bin/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile -m "$(QUICK)"

$(OTHER)/.setup: requirements/$(PLATFORM).lock requirements/dev.lock
	test -n "$(OTHER_PYTHON)" || { echo "no Python 3.12 or 3.13 here: make test-other-python OTHER_PYTHON=/path/to/python3.13"; exit 1; }
	$(PYTHON) -I onbeat/machine/disk_space.py $(OTHER) $(NEEDED_GB) "the packages in requirements/$(PLATFORM).lock"
	$(OTHER_PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/python requirements/install.py requirements/$(PLATFORM).lock requirements/dev.lock
	$(OTHER)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

bench: setup
	for name in time_to_reward vs_trl episodes examples_learn idle_environment pass_efficiency optimizer_step lean_layers memory beside_other_load overlap rollout_overhead shared_prompt tree_packing gac_staleness small_part delta_codec memory_plan scale weights_update weights_pull weights_relay ledger_throughput appendfsync waiting_jobs recovery dashboard_api dashboard_page container_start architectures; do \
		$(BIN)/python benchmarks/$$name.py || exit 1; done

# For a machine with an NVIDIA GPU, within 9 minutes and without a network: PyTorch, transformers and this checkout are
# enough, with the packages of gpu-check-wheels. PARTS='attention step' runs those alone.
gpu-check:
	$(OWN_PYTHON) -m benchmarks.gpu_check $(PARTS) $(if $(RESULTS),--folder $(RESULTS))

gpu-check-wheels:
	$(OWN_PYTHON) benchmarks/gpu_check/wheels.py .wheels

# The same without a GPU, on the versions that such a machine had: PyTorch 2.11, transformers 5.17, Python 3.12.
gpu-check-rehearsal: $(REHEARSAL)/.setup gpu-check-wheels
	CUDA_VISIBLE_DEVICES= $(REHEARSAL)/bin/python -m benchmarks.gpu_check $(PARTS) $(if $(RESULTS),--folder $(RESULTS))

$(REHEARSAL)/.setup: requirements/gpu-check.lock
	test -n "$(PYTHON312)" || { echo "no Python 3.12 here: make gpu-check-rehearsal PYTHON312=/path/to/python3.12"; exit 1; }
	$(PYTHON) -I onbeat/machine/disk_space.py $(REHEARSAL) 10 "PyTorch 2.11 with CUDA and its download"
	$(PYTHON312) -m venv --clear $(REHEARSAL)
	UV_NO_CACHE=1 $(REHEARSAL)/bin/python requirements/install.py requirements/gpu-check.lock
	touch $@

# The protocol's real scripts, explored in every order: larger bounds than in the tests.
model: setup
	$(BIN)/python -m tests.model

# Minutes of seeded faults (processes killed and paused, bad networks); the default tests have a few seconds of it.
chaos: setup
	$(BIN)/python benchmarks/chaos.py

# The references from the code, then the site into site/.
docs: setup
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Generated messages are committed, so users need no protoc.
proto: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --mypy_out=. \
		proto/onbeat/weights/v1/weights.proto proto/onbeat/rollout/v1/rollout.proto

clean:
	rm -rf .venv $(REHEARSAL) $(OTHER) .wheels site build dist
