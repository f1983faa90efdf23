# `make train` and `make test` work on a bare machine; ARGS="..." is passed on to what they run. YES=1 agrees to what
# they install or start outside this folder, which they ask about on a terminal.
ARGS ?=
export STACK PYTHON YES
# Where this is set, each of a run's processes compiles five thousand modules again: ten seconds of its start.
export PYTHONDONTWRITEBYTECODE =
.DEFAULT_GOAL := help
.PHONY: help setup train test test-rest test-all conformance lint format docs bench pictures chaos accept-gpu pins clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## make the virtual environment .venv with the pinned packages (STACK=cpu|gpu|rocm)
	@scripts/setup.sh
	@$(if $(filter setup,$(MAKECMDGOALS)),echo '. .venv/bin/activate')

train: setup ## train coding_rlvr, e.g. make train ARGS="seed=1 --name first"
	@.venv/bin/forge-env train coding_rlvr.yaml $(ARGS)

test: setup ## run the fast tests and one of each slow kind, e.g. make test ARGS="-k sandbox -x"
	@scripts/test.sh core $(ARGS)

test-rest: setup ## run the tests that `make test` leaves out, and third-party suites
	@scripts/test.sh rest $(ARGS)

test-all: setup ## run every test and third-party suites
	@scripts/test.sh all $(ARGS)

conformance: setup ## run the checks of other projects and write docs/conformance.md, or some: ARGS="mcp openenv"
	@.venv/bin/python -m benchmarks conformance $(if $(ARGS),$(ARGS),--record)

lint: setup ## check style, format and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup ## fix style and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: setup ## build the documentation as a site: build/docs/site/index.html
	@.venv/bin/python scripts/docs.py $(ARGS)

bench: setup ## list the benchmarks, or run one: make bench ARGS=environment_step
	@.venv/bin/python -m benchmarks $(ARGS)

pictures: setup ## take the pictures of the pages anew, of a finished run with tools: make pictures ARGS=runs/first
	@.venv/bin/python scripts/pictures.py $(ARGS)

accept-gpu: setup ## check training on a GPU, or some stages: make accept-gpu ARGS="--stages speed"
	@.venv/bin/python -m benchmarks accept $(ARGS)

chaos: setup ## kill parts of real training runs at random, e.g. make chaos ARGS="--runs 50 --record"
	@.venv/bin/python -m benchmarks chaos $(ARGS)

pins: setup ## resolve requirements/*.txt again from pyproject.toml
	@scripts/pins.sh $(ARGS)

clean: ## remove .venv, caches and build leftovers; runs/ stays
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
