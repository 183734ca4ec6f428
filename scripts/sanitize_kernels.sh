#!/usr/bin/env bash
# Run the kernels' tests under AddressSanitizer or ThreadSanitizer: scripts/sanitize_kernels.sh address|thread [pytest arguments]
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
export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan_suppressions.txt:report_signal_unsafe=0:exitcode=66"
# Built without the library in the compiler's way, tested with it.
uv run python -c "import sys; sys.path.insert(0, 'tests'); from gnomon.kernels import build; from kernels.built import *
build.ensure(resolve().kernel.kernel_cache, isas=all_isas(), flags=SANITIZERS['$GNOMON_TEST_SANITIZER'])"
LD_PRELOAD="$preload" .venv/bin/python -m pytest -n 0 -q -p no:cacheprovider \
  tests/kernels/test_quantized_matmul.py tests/kernels/test_matmul.py tests/kernels/test_rows.py tests/kernels/test_attention.py \
  tests/kernels/test_recurrent.py tests/kernels/test_layers.py tests/kernels/test_integer.py tests/kernels/test_in_place.py "$@"
