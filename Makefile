# The one door.  `make` lists what there is; every target makes what it needs, and a second call is fast.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
# Two builds at once in one checkout would write the same files: the second waits.
LOCK   := $(if $(shell command -v flock),flock build/.lock)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
.PHONY: help

# --- the development environment -------------------------------------------------------------------------------------

$(VENV)/.requirements: requirements/build.txt requirements/run.txt requirements/test.txt requirements/dev.txt
	@mkdir -p build
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(LOCK) $(PIP) install --quiet -r requirements/dev.txt
	@touch $@

$(VENV)/.editable: $(VENV)/.requirements pyproject.toml setup.py
	$(LOCK) $(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

build: $(VENV)/.editable ## compile the core in place, into .venv (editable)
	@$(LOCK) $(PY) setup.py --quiet build_ext --inplace
.PHONY: build
