#!/usr/bin/env bash
# Run the kernels' tests under AddressSanitizer or ThreadSanitizer: scripts/sanitize_kernels.sh address|thread [pytest arguments]
# AddressSanitizer runs them all. ThreadSanitizer runs every operation that shares work, for it takes some fifty times as long.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:?address or thread}" in
  address) library=libasan.so ;;
  thread) library=libtsan.so ;;
  *) echo "address or thread, not $1" >&2; exit 2 ;;
esac
export GNOMON_TEST_SANITIZER="$1"
shift
# The C++ library with it: a sanitizer looks for the throwing of exceptions when the process starts.
preload="$(c++ -print-file-name="$library") $(c++ -print-file-name=libstdc++.so.6)"
# Python and MLX leak at exit by design; MLX and numpy are not instrumented, so races inside them are not ours to report.
export ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0:verify_asan_link_order=0"
# Suppressed races (MLX's locks aren't seen) are many; looking each address up among those before takes hours.
export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan_suppressions.txt:report_signal_unsafe=0:exitcode=66:suppress_equal_addresses=0"
# Built without the library in the compiler's way, tested with it.
uv run python -c "import sys; sys.path.insert(0, 'tests'); from gnomon.kernels import build; from kernels.built import *
build.ensure(resolve().kernel.kernel_cache, isas=all_isas(), flags=SANITIZERS['$GNOMON_TEST_SANITIZER'])"
tests=(tests/kernels/test_threads.py)
if [ "$GNOMON_TEST_SANITIZER" = address ]; then
  for name in quantized_matmul matmul rows attention codes recurrent layers integer in_place; do tests+=("tests/kernels/test_$name.py"); done
fi
LD_PRELOAD="$preload" .venv/bin/python -m pytest -n 0 -q -p no:cacheprovider -p no:schemathesis "${tests[@]}" "$@"
