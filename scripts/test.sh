#!/usr/bin/env bash
# The whole test suite, from nothing but Python >= 3.10 and pip: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment requirements-dev.txt
# two test processes more than cores, one arithmetic thread each: many tests wait for processes of their own, and a third would
# cost its start and cache; with more than eight, memory would be short on machines with many cores
cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')
# compiled files of the project are kept: every program that a test starts would compile its modules anew
OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE='' exec "$PYTHON" -m pytest -n $((cores < 7 ? cores + 2 : 8)) --dist worksteal "$@"
