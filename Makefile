# `make demo` and `make test` are each one command on a fresh machine with Python 3.11 or later, git and make:
# everything is installed into .venv first.

PYTHON ?= python3
# The torch that a fresh .venv gets; a machine with a GPU may want another: make TORCH=torch==2.11.0 test
TORCH ?= torch==2.13.0
# What `make install` adds to the package itself: any of pyproject.toml's extras, comma-separated
EXTRA ?= test
# Passed on to pytest by test and test-fast: make test PYTEST_ARGS="-k spawn -x"
PYTEST_ARGS ?=
# Test files that run at the same time, on a core each (those of several processes share theirs)
WORKERS ?= 2
# Passed on by notebooks: make notebooks NOTEBOOK_ARGS=--write
NOTEBOOK_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One stamp per torch asked for, so that another TORCH reinstalls it
TORCH_STAMP := $(VENV)/.installed-torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
SOURCES := hf_wlb tests recipes docs notebooks

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test test-many test-fast lint typecheck format docs notebooks benchmark clean

help: ## Say what there is
	@echo "make TARGET, one of:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F '|' '{ printf "  %-10s %s\n", $$1, $$2 }'

install: $(VENV)/.installed-$(EXTRA) ## Install the package and EXTRA (test, dev, pipeline, ...) into .venv

demo: $(VENV)/.installed-base ## Train a tiny Llama on real text, a few minutes on 2 cores; see runs/demo
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/accelerate launch --config_file recipes/launch/cpu.yaml \
		recipes/llama_long_context.py --output_dir runs/demo

test: $(VENV)/.installed-test ## Run all tests that this machine can run
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations 25 --durations-min 5 $(PYTEST_ARGS)

test-many: $(VENV)/.installed-test ## Run the tests of 8 and 16 processes: some minutes, 10 GB of memory
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m many_ranks tests/distributed/test_many_ranks.py $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-test ## Run the unit tests only (no torch)
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## Check style and format with ruff
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))

typecheck: $(VENV)/.installed-dev ## Check the types of hf_wlb with mypy
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Sort imports, mend what ruff can mend, format
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

# Without --quiet, under which MkDocs counts no warnings and --strict lets everything pass.
docs: $(VENV)/.installed-docs ## Build the documentation's site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html; to search in it: $(BIN)/python -m http.server --directory site"

notebooks: $(VENV)/.installed-notebooks ## Execute the notebooks; a result that is not the stored one is an error
	$(TEST_ENVIRONMENT) $(BIN)/python notebooks/run.py $(NOTEBOOK_ARGS)

benchmark: $(VENV)/.installed-base ## Compare the packers on the reference lengths
	$(BIN)/python recipes/benchmarks/packing.py

clean: ## Remove caches, builds and the demo's results; to start afresh, remove .venv too
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/demo
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hf_wlb needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and by itself: the range that the package states could bring gigabytes of another build.
$(TORCH_STAMP): $(VENV)/.created
	rm -f $(VENV)/.installed-torch-*
	$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.installed-base: pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e .
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e ".[$*]"
	@touch $@
