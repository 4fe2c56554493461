#!/usr/bin/env bash
# The whole test suite, from nothing but Python >= 3.10 and pip: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment requirements-dev.txt
# three test processes, one arithmetic thread each: many tests wait for processes of their own, and leave a core to others
# compiled files of the project are kept: every program that a test starts would compile its modules anew
OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE='' exec "$PYTHON" -m pytest -n 3 --dist worksteal "$@"
