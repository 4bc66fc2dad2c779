# Everything a checkout needs. Each target sets up what it needs itself; a second run starts at once.
#
#   make demo               stock vLLM against Headway, side by side, on the embedded model (CPU)
#   make demo MODEL=name    the same with your own model, on a GPU machine
#   make test               lint, types, fast tests, then the tests that start a real vLLM
#
# PYTHON=python3.12 picks the interpreter for the virtual environment (3.11 to 3.14, default python3).

PYTHON ?= python3
MODEL ?=
export PYTHON MODEL

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench-quick clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

setup: ## prepare .venv (done by every other target as well)
	@scripts/setup

demo: setup ## serve and replay: stock vLLM against Headway, side by side
	@.venv/bin/headway demo $(if $(MODEL),--model '$(MODEL)')

test: setup ## lint, types, fast tests, tests on a real vLLM
	@scripts/lint
	@scripts/test

lint: setup ## style and types only
	@scripts/lint

bench-quick: setup ## every benchmark in its short form
	@scripts/bench --quick

clean: ## remove .venv and what tools left here
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
