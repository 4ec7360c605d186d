#!/usr/bin/env bash
# Builds fastmm and runs the tests that need no torch under each interpreter named in PYTHONS (commands on the PATH, or paths).
# Without PYTHONS: every python3.10 to python3.14 that the PATH has.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
pythons=${PYTHONS:-}
if test -z "$pythons"; then
    for minor in 10 11 12 13 14; do
        if command -v "python3.$minor" >/dev/null && "python3.$minor" -c '' 2>/dev/null; then pythons+=" python3.$minor"; fi
    done
fi
test -n "$pythons" || { echo "no interpreter found; name some: make test-pythons PYTHONS='python3.12 python3.13'" >&2; exit 1; }

for python in $pythons; do
    tag=$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
    work=build/pythons/$tag
    echo "== $("$python" --version)"
    test -x "$work/venv/bin/python" || "$python" -m venv "$work/venv"
    venv=$(cd "$work" && pwd)/venv/bin/python
    "$venv" -m pip --disable-pip-version-check --quiet install -r requirements/build.txt -r requirements/pythons.txt
    # From the sdist, in a directory of its own: no object of another interpreter, no file that is not shipped.
    "$venv" -m pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps --force-reinstall dist/fastmm-*.tar.gz
    "$venv" -m pytest -q -p no:cacheprovider tests
done
