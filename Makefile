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
# Virtual time does not mind who else computes. Of what opens sockets, most waits more than it computes; what measures
# has the machine for itself.
VIRTUAL := -n logical --maxprocesses 8 --dist worksteal -m "not socket"
SOCKETS := -n 3 --dist worksteal -m "socket and not (alone or lab or interop)"
ALONE := -m "alone and not (lab or interop)"
# Labs are whole networks of their own: what does not measure in them may stand beside another.
LABS := -n 3 --dist loadfile -m "(lab or interop) and not alone"
NONE_CHOSEN := 5
KERNELS := $(wildcard peerd/compute/kernels/source/*.cpp peerd/compute/kernels/source/*.h)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-all check types lint fast sim fuzz soak e2e interop lab foreign bench wheel clean

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

test: $(VENV)/.installed-dev  ## the whole product in some minutes; what takes long is left to test-all
	$(BIN)/python -m pytest $(VIRTUAL) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]
	$(BIN)/python -m pytest $(SOCKETS) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]
	$(BIN)/python -m pytest $(ALONE) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]

test-all: $(VENV)/.installed-dev  ## everything there is: network lab, foreign libp2p peers, many examples and mutations
	-@$(BIN)/python scripts/foreign/setup.py
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest $(VIRTUAL) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest $(SOCKETS) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest $(LABS) $(ARGS) || [ $$? = $(NONE_CHOSEN) ]
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest -m alone $(ARGS) || [ $$? = $(NONE_CHOSEN) ]

check: lint types fast  ## what to run before a commit: lint, types, fast tests

lint: $(VENV)/.installed-dev  ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev  ## mypy --strict on peerd and roles
	$(BIN)/mypy

fast: $(VENV)/.installed-dev  ## tests that take less than a quarter of a second each
	$(BIN)/python -m pytest $(FAST) $(ARGS)

sim: $(VENV)/.installed-dev  ## simulated swarms: churn, loss, partitions
	PEERD_TEST_ALL=1 $(BIN)/python -m pytest tests/sim $(ARGS)

fuzz: $(VENV)/.installed-dev  ## every decoder against 100,000 mutated inputs; a host against 20,000 hostile sessions
	PEERD_TEST_ALL=1 PEERD_FUZZ_SESSIONS=20000 $(BIN)/python -m pytest tests/fuzz $(ARGS)

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
