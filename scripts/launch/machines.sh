#!/usr/bin/env bash
# Train on several machines: run the same command on each of them, in any order, within ten minutes:
#   NNODES=2 HEAD=gpu01 bash scripts/launch/machines.sh configs/wf42m_pfc02_16gpus_r100.yaml data.path=/data/webface42m
# All arguments go to train.py. The environment may set
#   NNODES         number of machines; required
#   HEAD           host[:port] of one of them, by a name that all can resolve; required. The port, by default 29500, must be free
#   RUN_ID         name of this run, the same on all machines; default: that of the config. Runs with different names do not mix
#   IS_HEAD        1 or 0, if this script cannot detect whether it runs on HEAD (an address behind a load balancer)
#   NPROC          processes on this machine, the same on all; default: the number of visible GPUs
#   MAX_RESTARTS   how often all restart from the newest checkpoint after a process or machine was lost; default 3
#   PYTHON         the interpreter; default: python
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds to save after SIGTERM before SIGKILL; default 180
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the network interface, such as eth0; GPUs use the first one, CPUs the second one
# A lost machine rejoins with the same command. run.output must be a folder that all machines share; see docs/cluster.md.
set -euo pipefail
source "$(dirname "$0")/common.sh"
case "${1:-}" in
    "" | -h | --help) ;;
    *)
        [[ "${NNODES:-}" =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be the number of machines; --help explains"
        [ -n "${HEAD:-}" ] || fail "HEAD must be the host[:port] of one of the machines, the same on all; --help explains"
        ;;
esac
begin "$0" "$@"

port=29500
if [[ "$HEAD" == *:* ]]; then
    port="${HEAD##*:}"
fi
[[ "$port" =~ ^[1-9][0-9]*$ ]] || fail "HEAD: the port must be a number, got '$HEAD'"
# torchrun compares names to detect whether it runs on HEAD, and sends its host name to the others. Both fail if names and
# addresses disagree. So this machine is HEAD if it can bind HEAD's address, and it sends the address from which it reaches HEAD
facts="$("$PYTHON" - "${HEAD%:*}" "$port" <<'END'
import socket
import sys

host, port = sys.argv[1], int(sys.argv[2])
try:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
except OSError as error:
    sys.exit(f"error: HEAD: no address for {host} here ({error.strerror}); use a name that all machines know")
with socket.socket(family, socket.SOCK_DGRAM) as probe:
    try:
        probe.bind((address[0], 0))
        here = 1
    except OSError:
        here = 0
with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket: connect sends nothing
    try:
        probe.connect(address)
    except OSError as error:
        sys.exit(f"error: HEAD: no way from here to {host} ({error.strerror})")
    own = probe.getsockname()[0]
print(here, "" if own.startswith("127.") or own == "::1" else own)
END
)" || exit 1
read -r here address <<< "$facts"
torchrun+=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="${HEAD%:*}:$port")
torchrun+=(--rdzv-conf="is_host=${IS_HEAD:-$here},read_timeout=600") # HEAD may start last, up to ten minutes after the others
torchrun+=(--rdzv-id="${RUN_ID:-$(basename "$1" .yaml)}")
if [ -n "$address" ]; then
    torchrun+=(--local-addr="$address")
fi
exec "${torchrun[@]}" "$ROOT/train.py" "$@"
