#!/usr/bin/env bash
# Train on this machine, one process for each GPU (one on the CPU where there is none):
#   bash scripts/launch/machine.sh configs/ms1mv3_r50.yaml data.path=/data/ms1mv3 [section.key=value ...]
# All arguments go to train.py. The environment may set
#   NPROC          processes; default: the GPUs that are visible
#   MAX_RESTARTS   a process that dies is started again, with all others, from the newest checkpoint, so many times; default 3
#   PYTHON         the interpreter; default: python
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds to save after SIGTERM before SIGKILL; default 180
# SIGTERM and SIGUSR1 to this script's process: save at the next step and stop, exit status 1. docs/cluster.md has the rest.
set -euo pipefail
source "$(dirname "$0")/common.sh"
begin "$0" "$@"
exec "${torchrun[@]}" --standalone "$ROOT/train.py" "$@"
