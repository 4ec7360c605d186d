#!/usr/bin/env bash
# Fuzzes the decoder.  `make fuzz` sets the variables: $PYTHON has atheris, $ASAN_LIB the sanitizer build, $PRELOAD the sanitizers'
# runtime together with libFuzzer, which must be loaded before anything else.  $CORPUS, if given, is kept from run to run.
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
corpus=${CORPUS:-$work/corpus}
mkdir -p "$corpus" "$work/seeds"

run() { LD_PRELOAD=$PRELOAD PYTHONPATH=$ASAN_LIB "$PYTHON" decode_target.py "$@"; }

# The sanitizer must see what it is there for, or a clean run says nothing.
LD_PRELOAD=$PRELOAD PYTHONPATH=$ASAN_LIB "$PYTHON" - <<'PYTHON'
import os

import fastmm._native.decode_tree as module

wanted = os.path.realpath(os.environ["PYTHONPATH"])
assert os.path.realpath(module.__file__).startswith(wanted), f"{module.__file__} is not of the sanitizer build"
with open(module.__file__, "rb") as library:
    content = library.read()
assert b"__asan_init" in content and b"__sanitizer_cov" in content, "built without the sanitizers or without coverage"
PYTHON

run --seeds "$work/seeds"
run "$corpus" "$work/seeds" -max_total_time="${FUZZ_SECONDS:-60}" -max_len=16384 -timeout=20 -rss_limit_mb=4096 \
    -print_final_stats=1 -verbosity=0 -artifact_prefix="${ARTIFACTS:-./}" 2>&1 | sed '/Recommended dictionary/,/End of recommended/d'
