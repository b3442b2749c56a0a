# Two commands set everything up: `make quickstart` and `make test`. `make help` lists the rest.
VENV ?= .venv
BIN := $(VENV)/bin
HARNESSES ?= pi
override FRESH := $(if $(filter 1 true yes,$(FRESH)),fresh=true)
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test reproduce-small install harnesses lint format lock soak slurm-test bench-proxy bench-reference gpu-smoke clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

quickstart: harnesses  ## install everything, then train and evaluate a small model (FRESH=1 starts over)
	$(BIN)/yoke train +experiment=quickstart $(FRESH)

test: harnesses  ## install everything, then run the tests (ARGS="-k word" chooses)
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder --durations 15 $(ARGS)

reproduce-small: install  ## every step of REPRODUCE.md with the small model, on a CPU (FRESH=1 starts over)
	$(BIN)/python -m tools.reproduce $(if $(FRESH),--fresh) $(ARGS)

install:  ## make or repair the environment in VENV (default .venv)
	@python3 tools/install.py --venv $(VENV)

harnesses: install  ## install the coding agents named in HARNESSES, each in its own prefix
	$(BIN)/python -m pipeline.harness.install $(HARNESSES)

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## put the code in the form that lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: install  ## pin everything that setup.cfg asks for, with hashes, in requirements/cpu.txt
	PIP_FIND_LINKS= UV_FIND_LINKS= $(BIN)/uv pip compile --quiet --config-file requirements/uv.toml setup.cfg -o requirements/cpu.txt

soak: harnesses  ## the long tests
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

slurm-test: harnesses  ## the tests that need Slurm, on a private one of four pretend nodes (installs it as root)
	slurm/testbed/install.sh
	YOKE_REQUIRE_SLURM=1 $(BIN)/python -m pytest -m "not soak" --durations 15 $(ARGS) tests/slurm

bench-proxy: install  ## compare the capture proxy with the bare engine and the reference (QUICK=1, ALL=1)
	$(BIN)/python -m bench.run $(if $(QUICK),--quick) $(if $(ALL),--scenario all) $(ARGS)

bench-reference:  ## install the reference proxy for bench-proxy, in an environment of its own
	bench/reference.sh

gpu-smoke:  ## on a node with a GPU, in the environment for GPUs: what no CPU can show (ARGS="--size tiny"; docs/gpu.md)
	$(BIN)/python -m bench.gpu_smoke $(ARGS)

clean:  ## remove the environment and every cache; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
