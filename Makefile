# Two commands to know: `make run` trains a small swarm on this machine, `make test` runs the test suite.
# Both build what they need in .venv; nothing else on the machine is touched. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Without a GPU a much smaller torch will do: make run TORCH_INDEX=<address of PyTorch's index of CPU builds>
TORCH_INDEX ?=
INSTALL := $(PIP) install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
FAST := -m "not slow and not interop and not socket"
# One session for all tests, the longest first; what measures runs last, while nothing else does (tests/choice/schedule.py).
TESTS := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder
NONE_CHOSEN := 5
# test-all: which part of everything, such as 2/6; touched: seconds for it.
SLICE ?=
SECONDS ?= 240
MEASURED := .durations.tsv
KERNELS := $(wildcard peerd/codec/kernels/source/*.cpp peerd/codec/kernels/source/*.h)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-all touched durations check types lint fast sim fuzz soak e2e interop lab foreign bench wheel clean

help:  ## this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | sort | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "peerd needs Python 3.11 or newer; say which one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@echo "installing peerd and what it needs into $(VENV) (torch is large: this takes minutes the first time)"
	$(INSTALL) -e .
	@touch $@

# multiaddr asks for trio-typing, never imports it, and its old stubs would hide trio's own types from mypy.
$(VENV)/.installed-dev: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@echo "installing peerd with its development extras into $(VENV) (torch is large: this takes minutes the first time)"
	$(INSTALL) -e '.[dev,data]'
	@$(PIP) uninstall --quiet --yes trio-typing 2>/dev/null || true
	@touch $(VENV)/.installed $@

run: $(VENV)/.installed  ## train a swarm on this machine and watch it (options: ARGS="--steps 50 --calm")
	$(BIN)/peerd demo $(ARGS)

test: $(VENV)/.installed-dev  ## each property that peerd promises, in some minutes; what takes long is left to test-all
	$(TESTS) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]

test-all: $(VENV)/.installed-dev  ## everything: network lab, foreign libp2p peers, all examples (one of six parts: SLICE=2/6)
	-@$(BIN)/python scripts/foreign/setup.py
	PEERD_TEST_ALL=1 PEERD_TEST_SLICE=$(SLICE) $(TESTS) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]

touched: $(VENV)/.installed-dev  ## everything that tests what changed in the last 12 hours of commits, the nearest first
	PEERD_TEST_ALL=1 PEERD_TEST_TOUCHED=$(SECONDS) $(TESTS) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]

durations:  ## measure how long each test takes, by which slices are balanced (an hour)
	rm -f $(MEASURED)
	PEERD_TEST_DURATIONS=$(MEASURED) $(MAKE) test-all
	$(BIN)/python -m tests.choice.durations $(MEASURED)

check: lint types fast  ## what to run before a commit: lint, types, fast tests

lint: $(VENV)/.installed-dev  ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev  ## mypy --strict on peerd, roles and the simulator
	$(BIN)/mypy

fast: $(VENV)/.installed-dev  ## tests that take less than a quarter of a second each
	$(BIN)/python -m pytest $(FAST) $(ARGS)

sim: $(VENV)/.installed-dev  ## simulated swarms: churn, loss, partitions
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest tests/sim $(ARGS)

fuzz: $(VENV)/.installed-dev  ## every decoder against 100,000 mutated inputs; a host against 20,000 hostile sessions
	PEERD_TEST_ALL=1 $(TESTS) tests/fuzz $(ARGS)

soak: $(VENV)/.installed-dev  ## half an hour of training among hostile processes (Linux); ARGS="--minutes 5"
	$(BIN)/python scripts/soak.py $(ARGS)

e2e: $(VENV)/.installed-dev  ## real processes on loopback: kill one, training goes on; bad input; Ctrl+C
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest tests/e2e $(ARGS)

lab: $(VENV)/.installed-dev  ## peers on slow lines and behind NATs in a network lab (Linux, root, iproute2, nftables, gcc; else skipped)
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest tests/lab -rs $(ARGS)

foreign: $(VENV)/.installed-dev  ## fetch the go, js and py libp2p peers that the interoperability tests talk to
	$(BIN)/python scripts/foreign/setup.py

interop: foreign  ## talk to real go-libp2p, js-libp2p and py-libp2p peers
	PEERD_TEST_ALL=1 PEERD_REQUIRE_FOREIGN=1 $(BIN)/python -m pytest tests/interop $(ARGS)

bench: $(VENV)/.installed-dev  ## measure transport, quantization and slow lines against their baselines
	$(BIN)/python scripts/bench.py transport
	$(BIN)/python scripts/bench.py quantize
	$(BIN)/python scripts/bench.py lines

wheel: | $(BIN)/python  ## build dist/peerd-*.whl
	rm -rf build  # setuptools would pack stale copies
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:  ## remove what was built; keep the virtual environment
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
