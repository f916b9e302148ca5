# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: .venv/.installed  ## .venv with the exitflow command in it

DEMO := examples/campus.toml

demo: .venv/.installed  ## plan, train in three ways with three seeds each, report, serve: about two minutes
	rm -rf runs/demo
	$(BIN)/exitflow plan $(DEMO)
	$(BIN)/exitflow compare $(DEMO) --weightings auto,serving-rate,balanced-adj --seeds 9,42,67 --set training.rounds=15 --out runs/demo
	$(BIN)/exitflow report runs/demo
	$(BIN)/exitflow evaluate runs/demo/auto-seed-9
	$(BIN)/exitflow export runs/demo/auto-seed-9 --out runs/demo/bundle
	$(BIN)/exitflow load runs/demo/bundle --duration 15

# Three at a time, as many tests mostly wait, for processes that start, are frozen or killed.
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 1

test-fast: .venv/.installed-dev  ## tests without processes and ports, for daily work: under a minute
	$(PYTEST) --numprocesses 2 --alone -m "not heavy and not slow and not system"

test: .venv/.installed-dev  ## the test suite, without what takes longest
	$(PYTEST) --numprocesses 3 -m "not slow and not system"

test-system: .venv/.installed-dev  ## tests that need a browser, network namespaces or other programs of this machine
	$(PYTEST) -m system

test-all: test test-system  ## all tests
	$(PYTEST) -m "slow and not system"

check: .venv/.installed-dev  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev  ## rewrite the sources in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Documents with figures, by the store that they are written from.
TINY := $(wildcard docs/tables/tiny-*.md)
SMALL := README.md docs/results.md $(filter-out $(TINY),$(wildcard docs/tables/*.md))

results-update: .venv/.installed  ## every table, figure and value in the docs written anew from the store
	$(BIN)/python -m paper report paper/results/tiny.jsonl $(TINY:%=--update %)
	$(BIN)/python -m paper report paper/results/small.jsonl $(SMALL:%=--update %)

results-check: .venv/.installed  ## every table of results in the docs against the store
	$(BIN)/python -m paper report paper/results/tiny.jsonl $(TINY:%=--check %)
	$(BIN)/python -m paper report paper/results/small.jsonl $(SMALL:%=--check %)

docs: .venv/.installed-dev  ## the documentation as a site in site/, which works offline
	$(MKDOCS) build --strict

docs-serve: .venv/.installed-dev  ## the documentation at http://127.0.0.1:8000 while you write it
	$(MKDOCS) serve

bench: .venv/.installed-dev  ## every benchmark; minutes on an idle machine
	$(BIN)/python -m benchmarks

clean:  ## remove .venv and caches (runs/ stays)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

# pip need not compile everything for a minute: Python compiles what is imported, once, if it may write it down.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) '.[certs,export,flower,report,serve,train]'
	@touch $@

.venv/.installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) '.[dev]'
	@touch $@ .venv/.installed

.PHONY: help install demo test test-fast test-system test-all check format results-check results-update docs docs-serve bench clean
