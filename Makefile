# One command for each chore, the same by hand and in CI. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# What may be chosen: make serve PORT=9000 ARGS="--prefill 2"
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
PORT   ?=
TESTS  ?= tests
FIGURES ?= docs/figures
SOAK_MINUTES ?= 10
ARGS   ?=

BIN := $(VENV)/bin

# Images of containers often forbid Python to keep what it compiles. Tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# The stamp carries TORCH in its name (less what a file name cannot hold), so that another choice installs anew.
empty :=
STAMP := $(VENV)/.stamp-$(subst /,_,$(subst :,_,$(subst %,_,$(subst $(empty) $(empty),_,$(strip $(TORCH))))))

# For tests that start no process: two at a time, split so that neighbours share what they have set up.
IN_PAIRS := $(BIN)/python -m pytest -n 2 --dist worksteal --durations=15
# For those that start processes, and wait for them most of the time: two files at a time, the folders in their order.
BY_FILE := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40

.PHONY: help setup serve bench bench-grid bench-goodput quick test test-faults test-hosts test-image soak check check-types check-all-else stubs docs wheel lock clean distclean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  TORCH="torch==2.13.0"  the torch build to install, with pip options if need be'
	@echo '  PORT=8000              port of `make serve`;  ARGS="..." goes to tandem or pytest'
	@echo '  TESTS=tests/unit       part of the tests;     PYTHON=python3.12  interpreter of a new $(VENV)'
	@echo '  SOAK_MINUTES=2         a shorter soak;        FIGURES=DIR        where figures go (default: $(FIGURES))'

setup: $(STAMP)  ## create .venv and install everything, pinned

$(STAMP): pyproject.toml requirements/lock.txt tools/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" bash tools/setup.sh
	@rm -f $(VENV)/.stamp-*
	@touch "$@"

serve: $(STAMP)  ## start the cluster with the embedded model on http://127.0.0.1:8000
	@exec $(BIN)/tandem serve $(if $(PORT),--port $(PORT)) $(ARGS)

bench: $(STAMP)  ## measure Tandem and, with PEER_VENV=DIR, vLLM, in turn on the same loads (1.5 hours)
	@$(BIN)/python -m benchmarks.peers --json $(FIGURES)/peers.json $(ARGS)

bench-grid: $(STAMP)  ## measure a grid of loads on Tandem, Tandem colocated and, with PEER_VENV=DIR, vLLM (hours; goes on where it was)
	@$(BIN)/python -m benchmarks.grid --out $(FIGURES)/grid $(ARGS)

bench-goodput: $(STAMP)  ## search the goodput of Tandem, Tandem colocated and, with PEER_VENV=DIR, vLLM on five mixes (1.5 hours; goes on where it was)
	@$(BIN)/python -m benchmarks.goodput --out $(FIGURES)/goodput $(ARGS)

quick: $(STAMP)  ## run the tests that start no process and take no seconds
	@$(IN_PAIRS) -m "not processes and not long and not faults and not soak and not hosts" $(TESTS) $(ARGS)

test: $(STAMP)  ## run all tests (those for GPUs skip themselves where there is none)
	@codes=; \
		$(IN_PAIRS) -m "not processes and not faults and not soak and not hosts" $(TESTS) $(ARGS) && codes+=0 || codes+=$$?; \
		$(BY_FILE) -m "processes and not alone and not faults and not soak and not hosts" $(TESTS) $(ARGS) && codes+=0 || codes+=$$?; \
		TRITON_INTERPRET=1 $(IN_PAIRS) -m "interpreted and not faults and not soak and not hosts" $(TESTS) $(ARGS) && codes+=0 || codes+=$$?; \
		$(BIN)/python -m pytest --durations=15 -m "alone and not faults and not soak and not hosts" $(TESTS) $(ARGS) && codes+=0 || codes+=$$?; \
		case $$codes in 5555 | *[!05]*) exit 1 ;; esac  # 5: there was none to run

test-faults: $(STAMP)  ## run the whole kill matrix, and all other long tests; print the matrix (an hour on two cores)
	@rm -f $(FIGURES)/kill_matrix.json
	@status=0; KILL_MATRIX=$(FIGURES)/kill_matrix.json \
		$(BIN)/python -m pytest -m "" tests/scenarios/faults tests/cluster $(ARGS) || status=$$?; \
		$(BIN)/python -m pytest -m "faults and not interpreted" --ignore tests/scenarios/faults --ignore tests/cluster --ignore tests/gpu tests $(ARGS) || status=$$?; \
		$(IN_PAIRS) -m "not interpreted" tests/gpu $(ARGS) || status=$$?; \
		TRITON_INTERPRET=1 $(IN_PAIRS) -m interpreted tests/gpu $(ARGS) || status=$$?; \
		$(BIN)/python -m tests.scenarios.faults.report $(FIGURES)/kill_matrix.json && exit $$status

test-hosts: $(STAMP)  ## bring up clusters on test hosts, break hosts and networks, fill in the table (needs root)
	@status=0; HOST_FAULTS=docs/figures/host_faults.json \
		$(BIN)/python -m pytest -m "" --durations=15 tests/hosts $(ARGS) || status=$$?; \
		$(BIN)/python -m tests.hosts.report && exit $$status

test-image: $(STAMP)  ## carry out the Dockerfile in a fresh root, without an engine (10 minutes; needs root and debootstrap)
	@$(BIN)/python -m pytest -m "" --durations=15 tests/image $(ARGS)

soak: $(STAMP)  ## ten minutes of mixed load on 2P2D with a random fault every five seconds
	@SOAK_MINUTES=$(SOAK_MINUTES) SOAK_REPORT=$(FIGURES)/soak.json $(BIN)/python -m pytest -s -m soak tests/soak $(ARGS)

check: check-types check-all-else  ## ruff, mypy --strict, import layers, generated files fresh (make -j2: side by side)

check-types: $(STAMP)
	$(BIN)/mypy

check-all-else: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_stubs.py --check
	$(BIN)/python tools/generate_config_docs.py --check
	$(BIN)/python tools/generate_dashboard.py --check
	$(BIN)/python -m benchmarks.docs --check

stubs: $(STAMP)  ## generate tandem/rpc/v1 from protos/
	$(BIN)/python tools/generate_stubs.py

docs: $(STAMP)  ## generate tandem.yaml, docs/configuration.md, docs/benchmarks.md, docs/studies.md, and the board and hosts file in deploy/
	$(BIN)/python tools/generate_config_docs.py
	$(BIN)/python tools/generate_dashboard.py
	$(BIN)/python -m benchmarks.docs
	$(BIN)/tandem hosts --head 192.168.1.10 --prefill 192.168.1.11,192.168.1.12 --decode 192.168.1.13,192.168.1.14 \
		--user tandem > deploy/on-premises.yaml

wheel: $(STAMP)  ## build the wheel into dist/
	@rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	@cd dist && ls *.whl > wheel.txt  # the one that the hosts of a cluster install

lock: $(STAMP)  ## resolve all pins anew and write requirements/lock.txt
	@VENV="$(VENV)" bash tools/lock.sh

clean:  ## remove what was built and cached; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv too
	rm -rf "$(VENV)"
