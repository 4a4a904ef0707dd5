#!/bin/sh
# Builds the extension under the address and undefined-behaviour sanitizers, and runs the fuzzer on it:
#
#     csrc/sanitize.sh [FIRST [COUNT]]
#
# Needs what a usual build needs (docs/decode.md), by GCC, and an environment with simplejpeg, numpy and Pillow.
# PYTHON names its interpreter. Exit code 0: neither the sanitizers nor the fuzzer have found anything.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
compiler=${CC:-gcc}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
cflags=$(pkg-config --cflags libjpeg 2>/dev/null || true)
libraries=$(pkg-config --libs libjpeg 2>/dev/null || echo -ljpeg)
# shellcheck disable=SC2086
"$compiler" -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -fPIC -shared \
    -DPy_LIMITED_API=0x030b0000 -I"$include" $cflags "$here/jpeg_extension.c" \
    -o "$folder/_raypipe_jpeg.abi3.so" $libraries

# The interpreter itself is not built under them, so their libraries come first; it never frees all that it has.
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
run() {
    env LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 \
        PYTHONPATH="$folder" PYTHONMALLOC=malloc "$python" "$@"
}
run -c "import _raypipe_jpeg; assert _raypipe_jpeg.__file__.startswith('$folder'), _raypipe_jpeg.__file__"
run "$here/fuzz.py" "$@"
