# Two commands: `make demo` and `make test`. Both do all their own set-up on a fresh Debian machine.
#
#   make demo        a real model answers from cached KV
#   make test        everything that must hold: lint, types, floors, native sanitizers, Python tests
#   make test-vllm   the vLLM connector on a real vLLM engine, in .venv-vllm (first time: some 600 MB)
#   make build       .venv with the package in place (rebuilds the native core when it changed)
#   make fuzz        the fuzzers at full length (minutes; short runs are part of make test)
#   make explore     new random examples for the model-based tests (minutes)
#   make protos      generate kvstore/v1 from protos/ again
#   make soak        a hundred kills of a daemon under load, each followed by a warm restart (minutes)
#   make crash       ten thousand images of a disk that lost power, each opened again (minutes)
#   make kill9       a hundred times kill -9 in the middle of writes to the disk; nothing flushed is lost (minutes)
#   make bench-nvme  fetches and saves through the daemon beside fio, into bench/results (a quarter of an hour)
#   make numbers     write README's figures from bench/results again
#   make format      let ruff format the tree
#   make bench-vllm  time to first token and overhead with vLLM, into bench/results (half an hour)
#   make peers       other stores, each in a virtual environment of its own, for bench.local --peers
#   make clean       remove what make made

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# 3.11 first: the CPU wheels of torch and vLLM that the tests pin exist for it.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) >/dev/null 2>&1 && python$(v) -c '' 2>/dev/null && echo python$(v))))
VENV := .venv
BIN := $(VENV)/bin
# vLLM pins torch, numpy and much else, so it has an environment of its own; its CPU wheels need Python 3.11.
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= $(PYTHON)
JOBS ?= $(shell nproc)
EXTRAS ?= torch,bench,router,dev

.PHONY: demo test build lint native-test pytest fuzz protos soak numbers explore format clean system doctest

demo: build
	$(BIN)/kvstore demo

test: build lint native-test pytest

build: $(VENV)/.installed

# ---- set-up ---------------------------------------------------------------------------------------------------

system:
	@tools/system_packages.sh build "$(PYTHON)"

doctest:
	@tools/system_packages.sh test "$(PYTHON)"

$(VENV)/bin/python: | system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch comes first and by itself, so that no later requirement can pull a CUDA build onto a CPU-only machine.
$(VENV)/.torch: tools/install_torch.py | $(VENV)/bin/python
	$(BIN)/python tools/install_torch.py
	@touch $@

NATIVE := $(wildcard native/src/* native/CMakeLists.txt)
$(VENV)/.installed: pyproject.toml $(NATIVE) $(VENV)/.torch
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.11" "nanobind>=2.7" "cmake>=3.25" ninja
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

$(VLLM_VENV)/.installed: pyproject.toml tools/install_vllm.py $(NATIVE) | system
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(VLLM_PYTHON) tools/install_vllm.py $(VLLM_VENV)
	@touch $@

# Redis from the system, LMCache, openlake-vllm and redhare from the registry: some 800 MB.
.PHONY: peers
peers: build
	@tools/system_packages.sh peers "$(PYTHON)"
	$(BIN)/python tools/install_peers.py

# ---- checks ---------------------------------------------------------------------------------------------------

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The same suite under two sanitizers: memory and undefined behaviour, then data races.
native-test: build doctest
	$(MAKE) --no-print-directory sanitize-address,undefined
	$(MAKE) --no-print-directory crash-short
	$(MAKE) --no-print-directory sanitize-thread

# Images of a disk that lost power: the log of a run cut anywhere, unsynced writes dropped or reordered.
.PHONY: crash crash-short
crash-short: doctest
	$(BIN)/cmake --build build/native-address,undefined --parallel $(JOBS) --target crash_images
	build/native-address,undefined/crash_images --images 1000 --seed 1

crash: build doctest
	$(BIN)/cmake -S native -B build/native-crash -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_BUILD_TYPE=Release -DKVCORE_PYTHON=OFF -DKVCORE_TESTS=ON >/dev/null
	$(BIN)/cmake --build build/native-crash --parallel $(JOBS) --target crash_images
	build/native-crash/crash_images --images $(IMAGES)

sanitize-%: build doctest
	$(BIN)/cmake -S native -B build/native-$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 -DKVCORE_PYTHON=OFF -DKVCORE_TESTS=ON -DKVCORE_SANITIZE=$* >/dev/null
	$(BIN)/cmake --build build/native-$* --parallel $(JOBS) --target kvcore_tests
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/native-$*/kvcore_tests

pytest: build
	$(BIN)/python -m pytest

# With settings of its own (tests_vllm/pytest.ini); not part of `make test`, which needs no vLLM.
.PHONY: test-vllm bench-vllm
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests_vllm

bench-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m bench.vllm --save

# New random examples for the model-based tests, as long as nothing fails.
explore: build
	for i in $$(seq 10); do HYPOTHESIS=explore $(BIN)/python -m pytest --timeout 900 tests/model || exit 1; done

# ---- on demand --------------------------------------------------------------------------------------------------

FUZZ_FRAMES ?= 1000000
IMAGES ?= 10000
FUZZ_MESSAGES ?= 100000
FUZZ_SEED ?= 0
fuzz: build
	$(BIN)/python -m tests.fuzz.session_frames --frames $(FUZZ_FRAMES) --seed $(FUZZ_SEED) --json
	$(BIN)/python -m tests.fuzz.grpc_messages --messages $(FUZZ_MESSAGES)

protos: build
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. kvstore/v1/store.proto kvstore/v1/routing.proto

soak: build
	$(BIN)/python tests/e2e/keep_rounds.py --rounds 100

KILLS ?= 100
.PHONY: kill9 bench-nvme
kill9: build
	$(BIN)/python -m bench.kill9 --rounds $(KILLS)

bench-nvme: build
	@tools/system_packages.sh nvme "$(PYTHON)"
	$(BIN)/python -m bench.nvme --save

numbers: build
	$(BIN)/python -m bench.numbers

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-peers build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
