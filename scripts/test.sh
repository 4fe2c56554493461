#!/usr/bin/env bash
# The whole test suite, from nothing but Python >= 3.10 and pip: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment requirements-dev.txt
# two test processes at most, one arithmetic thread each: the tests start processes of their own
OMP_NUM_THREADS=1 exec "$PYTHON" -m pytest -n 2 --dist worksteal "$@"
