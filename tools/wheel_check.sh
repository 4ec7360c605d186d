#!/usr/bin/env bash
# Installs the wheel in dist/ into a clean environment that has the run-time requirements and nothing else, outside the
# checkout, and uses it there: import, headers, a C program against them, one request encoded and decoded without torch.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
wheels=("$here"/dist/fastmm-*.whl)
test "${#wheels[@]}" = 1 && test -f "${wheels[0]}" || { echo "want exactly one wheel in dist/, run make wheel" >&2; exit 1; }

"$here/.venv/bin/python" "$here/tools/check_wheel.py" "${wheels[0]}" "$here"/dist/fastmm-*.tar.gz

room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
"$python" -m venv "$room/venv"
pip=("$room/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install "${wheels[0]}"
"${pip[@]}" check
cp "$here/tools/wheel_smoke.py" "$room/"
cd "$room"
# -I: neither the current directory, nor PYTHONPATH, nor the user's site-packages may help.
"$room/venv/bin/python" -I "$room/wheel_smoke.py"

include=$("$room/venv/bin/python" -I -c 'import fastmm; print(fastmm.get_include())')
case $include in "$room"/*) ;; *) echo "get_include() of the wheel is $include" >&2; exit 1 ;; esac
for header in "$include"/fastmm/*.h; do # each header stands alone, in C and in C++
    name=fastmm/$(basename "$header")
    printf '#include <%s>\nint fmm_downstream(void);\nint fmm_downstream(void) { return 0; }\n' "$name" >"$room/one.c"
    gcc -std=c11 -Wall -Wextra -Werror -Wno-unused-function -I"$include" -c "$room/one.c" -o "$room/one.o"
    cp "$room/one.c" "$room/one.cpp"
    g++ -std=c++17 -Wall -Wextra -Werror -Wno-unused-function -I"$include" -c "$room/one.cpp" -o "$room/one.o"
done
echo "wheel: installs, imports, encodes and decodes with its run-time requirements alone; its headers compile"

# The downstream extension again, this time against the wheel's own headers and .pxd files.
FASTMM_DOWNSTREAM_PREFIX="$("$room/venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
    "$here/.venv/bin/python" -m pytest -q "$here/tests/test_packaging_downstream.py"
