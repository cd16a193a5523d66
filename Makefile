# Everything runs from .venv in this checkout. `make test` and `make demo` set it up on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BENCH  := $(VENV)/.ready-bench
COMPARE := $(VENV)/.ready-compare
DOCS   := $(VENV)/.ready-docs
RELEASE := $(VENV)/.ready-release
BROWSER := $(VENV)/.ready-browser
FRAMEWORKS := $(VENV)/.ready-frameworks
NATIVE := $(wildcard src/sonde/stats/native/*.[ch])
MUTATIONS ?= 1000
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, and each would compile Sonde again

.DEFAULT_GOAL := help
.PHONY: help demo test test-frameworks slow fuzz lint docs bench bench-faults compare wheel wheel-test compat view gallery clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

demo: $(READY) ## train a small network on digits, show what was seen inside and which samples fail
	$(BIN)/python examples/demo.py

test: $(READY) $(BROWSER) lint ## run all checks: style, types, layers, tests
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-frameworks: $(FRAMEWORKS) ## run what is tested with real training frameworks, trackers and notebooks (installs them)
	env -u CI $(BIN)/python -m pytest -q tests/integrations tests/record/test_framework_optimizers.py \
	  tests/record/test_any_optimizer.py tests/cli/test_run.py tests/views/test_assistant.py tests/browser/test_notebook.py

slow: $(READY) ## run the tests and list the slowest twenty
	$(BIN)/python -m pytest -q -n auto --dist worksteal --durations=20

fuzz: $(READY) ## run the property tests on new random examples, then damage files of a run and read it in every way
	$(BIN)/python -m pytest -q -o faulthandler_timeout=0 -m hypothesis --hypothesis-profile=default tests
	SONDE_ALL_FAULTS=1 SONDE_KILLS=1000 SONDE_POWER_LOSSES=500 $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/injection \
		tests/session/test_crash.py tests/store/test_power_loss.py
	$(BIN)/python -m tests.hostile.campaign --mutations $(MUTATIONS) --corpus .fuzz
	$(BIN)/python -m tests.hostile.many_requests --requests 10000 --runs 50 --descriptors 256

lint: $(READY) ## check style, types and the layering of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DOCS) ## build the documentation site into site/, to be opened from disk; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

wheel: $(RELEASE) ## build the sdist and the wheel into dist/
	$(BIN)/python -m build --outdir dist .

wheel-test: $(RELEASE) ## build the packages and use them in fresh environments without the sources (minutes)
	$(BIN)/python tests/release/check_wheel.py

compat: $(RELEASE) ## run the core of the tests on the oldest and the newest torch, numpy, ... (downloads 6 GB)
	$(BIN)/python tests/release/check_versions.py

compare: $(COMPARE) ## compare with other tools: cost, diagnosis, storage; prints the tables of docs/comparison.md (10 minutes)
	cd benchmarks && ../$(BIN)/python compare.py

bench: $(BENCH) ## measure what watching costs, side by side with other tools
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/scopes.py
	$(BIN)/python benchmarks/kernel.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/pages.py
	$(BIN)/python benchmarks/capture.py

bench-faults: $(READY) ## measure who finds what is wrong: three seeds of every program in tests/faults
	SONDE_ALL_PROGRAMS=1 $(BIN)/python -m pytest -q tests/faults tests/parallel
	$(BIN)/python benchmarks/faults.py --seeds 3 --bare

view: $(READY) ## open the viewer at the demo's runs in the browser
	@test -d runs/digits || $(MAKE) demo
	$(BIN)/sonde view runs

gallery: $(READY) $(BROWSER) ## draw every figure, page and terminal view of two small trainings into docs/images
	$(BIN)/python docs/make_gallery.py
	@test -d runs/digits || $(MAKE) demo
	$(BIN)/python docs/make_viewer_pictures.py

clean: ## remove the environment and what the demo wrote
	rm -rf $(VENV) runs build dist site

$(READY): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Sonde needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch,export,view,dev]'
	@touch $@

$(BENCH): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

$(COMPARE): $(BENCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[compare]'
	@touch $@

$(FRAMEWORKS): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[frameworks]'
	@touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

$(RELEASE): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[release]'
	@touch $@

# Browser tests and pictures drive the distribution's Chromium. Where it cannot be installed, those tests skip and say so.
$(BROWSER): $(READY)
	@$(BIN)/python tests/browser/chromium.py || $(AS_ROOT) sh -c 'export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -q && apt-get install -y -q --no-install-recommends chromium' \
	  || echo "There is no Chromium and it could not be installed: browser tests will be skipped."
	@$(BIN)/python tests/browser/chromium.py && touch $@ || true
