# The commands of a working copy. `make help` lists them. Everything runs in .venv, which `setup` makes and keeps current.

PYTHON ?= python3
# Arguments for every pytest run, for example PYTEST_ARGS="-k lease -x".
PYTEST_ARGS ?=
# What `make sim` runs: so many fresh seeds, or the one seed SEED with everything that happens in it.
SEEDS ?= 1000
SEED ?=
# How many clients `make campaign` kills, and how often it kills the bridge.
KILLS ?= 200
RESTARTS ?= 20
# How long `make fuzz` draws inputs, what for (default: every decoder), and whether it adds what it found to the corpus.
SECONDS ?= 600
TARGETS ?=
KEEP ?=
# Test processes; 0 runs the tests in pytest's own process, where a debugger finds them.
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A lock names everything that is installed and the hash of each file; nothing is built from source, which would bring
# along what no lock names.
INSTALL := $(PIP) install --quiet --require-hashes --no-deps --only-binary :all:
LOCKS := $(wildcard locks/*.txt)
OVERLAY := $(VENV)/overlays/transformers-5.0.0
ACCEPTED_API := proto/kvbridge.binpb

# Neighbours stay together as long as both processes have work: many share a bridge.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
TYPED_PATHS := kvbridge $(wildcard tests) $(sort $(dir $(wildcard benchmarks/*.py examples/*.py scripts/*.py)))

# Models and data come from packages: nothing here asks a hub for anything.
export HF_HUB_OFFLINE := 1
# Tests start hundreds of processes. Where bytecode is not kept, as in many containers, each would compile everything again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

##@ Working copy

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.installed $(OVERLAY)/.installed ## Make .venv, or bring it up to date (does nothing if it is)

$(VENV)/.installed: pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"kvbridge needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --requirement locks/pip.txt
	$(INSTALL) --requirement locks/main.txt --requirement locks/model.txt
	$(INSTALL) --requirement locks/torch-cpu.txt || { \
	    echo 'No torch for the CPU alone is to be had here; taking the one for CUDA.'; \
	    $(INSTALL) --requirement locks/torch-cuda.txt; }
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(OVERLAY)/.installed: locks/transformers-5.0.txt $(VENV)/.installed
	rm -rf $(OVERLAY)
	$(INSTALL) --target $(OVERLAY) --requirement $<
	@touch $@

.PHONY: demo
demo: setup ## Hand a cache over between two real models and show what it saves
	$(BIN)/kvbridge demo

.PHONY: clean
clean: ## Remove caches and build results
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean ## Remove .venv too
	rm -rf $(VENV)

##@ Tests

.PHONY: test
test: test-main test-transformers ## Run test-main and test-transformers

.PHONY: test-main
test-main: setup ## Run the tests that need neither minutes nor a GPU
	$(PYTEST) -m 'not slow and not gpu' $(PYTEST_ARGS)

.PHONY: test-transformers
test-transformers: setup ## Run the transformers tests on the oldest supported release
	@PYTHONPATH=$(OVERLAY) $(BIN)/python -c 'import transformers; assert transformers.__version__ == "5.0.0", transformers'
	PYTHONPATH=$(OVERLAY) $(PYTEST) -m 'not slow and not gpu' $(PYTEST_ARGS) tests/integration/transformers

.PHONY: test-slow
test-slow: setup ## Run the tests that take minutes
	$(PYTEST) -m 'slow and not gpu' --timeout 1800 $(PYTEST_ARGS)

.PHONY: sim
sim: setup ## Run fresh seeds of the simulator (SEEDS=1000), or one again (SEED=...)
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

.PHONY: fuzz
fuzz: setup ## Fuzz the decoders, guided by coverage (SECONDS=600, TARGETS="spec seal", KEEP=1 adds to the corpus)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --jobs $(JOBS) $(if $(KEEP),--keep) $(TARGETS)

.PHONY: campaign
campaign: setup ## Kill clients and the bridge under load (KILLS=200 RESTARTS=20, SEED=...)
	$(BIN)/python -m tests.faults.campaign --kills $(KILLS) --restarts $(RESTARTS) $(if $(SEED),--seed $(SEED))

.PHONY: days
days: setup ## Live 24 simulated hours at 100 handoffs per second: the whole node, and the core alone (takes hours)
	$(BIN)/python -m tests.sim.core_day
	$(BIN)/python -m tests.sim.day

.PHONY: test-gpu
test-gpu: setup ## Run the tests that need a CUDA device
	$(PYTEST) -m gpu --timeout 600 $(PYTEST_ARGS)

.PHONY: bench
bench: setup ## Run the benchmarks
	$(BIN)/python -m benchmarks

##@ Checks

.PHONY: lint
lint: lint-python lint-proto ## Run every check that needs no test

.PHONY: audit
audit: setup ## Check that what is installed is what is locked, and that its licences are allowed
	$(BIN)/python scripts/audit.py

.PHONY: lint-python
lint-python: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy $(TYPED_PATHS)
	$(BIN)/lint-imports

.PHONY: lint-proto
lint-proto: setup
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against $(ACCEPTED_API)
	scripts/stubs.sh $(BIN)/python check

.PHONY: format
format: setup ## Format the code and the API, and apply the linter's safe fixes
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/buf format --write

##@ Generated files

.PHONY: proto
proto: setup ## Generate the stubs in kvbridge/v1 from proto/
	scripts/stubs.sh $(BIN)/python write

# `make lint` fails on a change that would break a client of the accepted API. The image is replaced when a release
# freezes what was added since, or, before 1.0, together with a deliberate break that its commit and the changelog explain.
.PHONY: proto-accept
proto-accept: setup ## Accept the API in proto/ as the one that later changes must not break
	$(BIN)/buf build --exclude-source-info --output $(ACCEPTED_API)

.PHONY: lock
lock: setup ## Resolve every dependency again and write locks/*.txt (UPGRADE=1 for newer versions)
	$(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)
