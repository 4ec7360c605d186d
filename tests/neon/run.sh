#!/usr/bin/env bash
# The kernels where there is no such machine at hand: cross-compiled for aarch64 and run under qemu-user, and built with
# no SIMD at all, for both. The driver compares every kernel with the scalar ones.
#
#   tests/neon/run.sh [full]      full: all 2^32 float32 inputs too (long under qemu)
set -euo pipefail
cd "$(dirname "$0")/../.."

have() { command -v "$1" >/dev/null; }

if ! have aarch64-linux-gnu-gcc || ! have qemu-aarch64; then
    if [ "$(id -u)" != 0 ] || ! have apt-get; then
        echo "test-neon: needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null
fi

out=build/neon
mkdir -p "$out"
sources=(tests/neon/driver.c src/fastmm/_native/c/{cpu,registry,cast_scalar,cast_avx2,cast_avx512,cast_neon}.c)
flags=(-std=gnu11 -O3 -Wall -Wextra -Werror -ffp-contract=off -Iinclude -Isrc/fastmm/_native/c)

check() { # name, compiler with its flags, runner or nothing
    local name=$1 compiler=$2 runner=$3
    echo "== $name"
    $compiler "${flags[@]}" "${sources[@]}" -o "$out/$name"
    $runner "$out/$name" ${4:-}
}

check aarch64 "aarch64-linux-gnu-gcc -static" "qemu-aarch64" "${1:-}" | tee "$out/aarch64.log"
grep -q '^neon *equals scalar' "$out/aarch64.log" || { echo "test-neon: the NEON kernels did not run" >&2; exit 1; }
check aarch64-scalar "aarch64-linux-gnu-gcc -static -DFMM_NO_SIMD" "qemu-aarch64"
check native "${CC:-gcc}" ""
check native-scalar "${CC:-gcc} -DFMM_NO_SIMD" ""
