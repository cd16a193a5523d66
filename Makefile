# Everything runs from .venv in this checkout. `make test` and `make demo` set it up on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BENCH  := $(VENV)/.ready-bench
BROWSER := $(VENV)/.ready-browser
NATIVE := $(wildcard src/sonde/stats/native/*.[ch])
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz lint bench bench-faults view clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(READY) ## train a small network on digits, show what was seen inside and which samples fail
	$(BIN)/python examples/demo.py

test: $(READY) $(BROWSER) lint ## run all checks: style, types, layers, tests
	$(BIN)/python -m pytest -q

fuzz: $(READY) ## run the property tests on new random examples (make test draws the same ones every time)
	$(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=default tests

lint: $(READY) ## check style, types and the layering of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BENCH) ## measure what watching costs, side by side with other tools
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/scopes.py
	$(BIN)/python benchmarks/kernel.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/pages.py
	$(BIN)/python benchmarks/capture.py

bench-faults: $(READY) ## measure who finds what is wrong: three seeds of every program in tests/faults
	SONDE_ALL_PROGRAMS=1 $(BIN)/python -m pytest -q tests/faults
	$(BIN)/python benchmarks/faults.py --seeds 3 --bare

view: $(READY) ## open the viewer at the demo's runs in the browser
	@test -d runs/digits || $(MAKE) demo
	$(BIN)/sonde view runs

gallery: $(READY) $(BROWSER) ## draw every figure, page and terminal view of two small trainings into docs/images
	$(BIN)/python docs/make_gallery.py
	@test -d runs/digits || $(MAKE) demo
	$(BIN)/python docs/make_viewer_pictures.py

clean: ## remove the environment and what the demo wrote
	rm -rf $(VENV) runs build

$(READY): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Sonde needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch,export,view,dev]'
	@touch $@

$(BENCH): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

# Browser tests and pictures drive the distribution's Chromium. Where it cannot be installed, those tests skip and say so.
$(BROWSER): $(READY)
	@$(BIN)/python tests/browser/chromium.py || $(AS_ROOT) sh -c 'export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -q && apt-get install -y -q --no-install-recommends chromium' \
	  || echo "There is no Chromium and it could not be installed: browser tests will be skipped."
	@$(BIN)/python tests/browser/chromium.py && touch $@ || true
