#!/usr/bin/env bash
# Train on this machine, with one process per GPU (one process on the CPU if there is no GPU):
#   bash scripts/launch/machine.sh configs/ms1mv3_r50.yaml data.path=/data/ms1mv3 [section.key=value ...]
# All arguments go to train.py. The environment may set
#   NPROC          processes; default: the number of visible GPUs
#   MAX_RESTARTS   how often all processes are restarted from the newest checkpoint after one died; default 3
#   PYTHON         the interpreter; default: python
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds to save after SIGTERM before SIGKILL; default 180
# After SIGTERM or SIGUSR1 to this script's process, the run saves at the next step and stops, with exit status 1. See
# docs/cluster.md.
set -euo pipefail
source "$(dirname "$0")/common.sh"
begin "$0" "$@"
exec "${torchrun[@]}" --standalone "$ROOT/train.py" "$@"
