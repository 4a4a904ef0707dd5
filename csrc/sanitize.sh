#!/bin/sh
# Builds the extension under sanitizers, and runs the fuzzer on it:
#
#     csrc/sanitize.sh [FIRST [COUNT]]            addresses and undefined behavior
#     SANITIZER=thread csrc/sanitize.sh …         races between the threads of a call
#
# Needs what a usual build needs (docs/transforms.md), by GCC, and an environment with raypipe's own dependencies.
# PYTHON names its interpreter. Exit code 0: neither the sanitizers nor the fuzzer have found anything.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
compiler=${CC:-gcc}
sanitizer=${SANITIZER:-address,undefined}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
cflags=$(pkg-config --cflags libjpeg 2>/dev/null || true)
libraries=$(pkg-config --libs libjpeg 2>/dev/null || echo -ljpeg)
# shellcheck disable=SC2086
"$compiler" -O1 -g -fno-omit-frame-pointer "-fsanitize=$sanitizer" -fno-sanitize-recover=all -ffp-contract=off \
    -fPIC -shared -pthread -DPy_LIMITED_API=0x030b0000 -I"$include" $cflags "$here/kernel.c" \
    -o "$folder/_raypipe_kernel.abi3.so" $libraries

# The interpreter itself is not built under them, so their libraries come first; it never frees all that it has.
if [ "$sanitizer" = thread ]; then
    preload=$("$compiler" -print-file-name=libtsan.so)
else
    preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
fi
# Of threads, only what the extension's own do is of interest: OpenBLAS's and OpenCV's wait in libraries that are not
# built under the sanitizer.
run() {
    env LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=exitcode=66:ignore_noninstrumented_modules=1 OPENBLAS_NUM_THREADS=1 \
        PYTHONPATH="$folder:$here/..${PYTHONPATH:+:$PYTHONPATH}" PYTHONMALLOC=malloc "$python" "$@"
}
run -c "import _raypipe_kernel as kernel; assert kernel.__file__.startswith('$folder'), kernel.__file__"
run "$here/fuzz.py" "$@"
