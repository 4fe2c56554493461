# Sourced by machine.sh and machines.sh: the steps of both before they start torchrun.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Print the comment at the top of a script.
show_help() {
    sed '1d; /^[^#]/,$d; s/^#\( \|$\)//' "$1"
}

# begin SCRIPT ARGUMENT...    answer --help, find Python, and open configuration and data once, so that a mistake in them is one
# line instead of one per process and restart. Sets PYTHON, ROOT, NPROC, MAX_RESTARTS and the array torchrun.
begin() {
    local script="$1" torch
    shift
    case "${1:-}" in
        -h | --help) show_help "$script"; exit 0 ;;
        "") fail "no config given: bash $script configs/NAME.yaml [section.key=value ...]; --help explains" ;;
    esac
    ROOT="$(cd "$(dirname "$script")/../.." && pwd)"
    PYTHON="${PYTHON:-python}"
    command -v "$PYTHON" > /dev/null || fail "no program '$PYTHON'; activate the environment or set PYTHON"
    NPROC="${NPROC:-$(count_gpus)}"
    [[ "$NPROC" =~ ^[1-9][0-9]*$ ]] || fail "NPROC: the number of processes must be a whole number from 1, got '$NPROC'"
    MAX_RESTARTS="${MAX_RESTARTS:-3}"
    [[ "$MAX_RESTARTS" =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS must be a whole number from 0, got '$MAX_RESTARTS'"
    "$PYTHON" "$ROOT/train.py" "$@" --check > /dev/null || exit 1
    torchrun=("$PYTHON" "$ROOT/scripts/launch/torchrun.py" --nproc-per-node="$NPROC" --max-restarts="$MAX_RESTARTS")
    if [ "$NPROC" -gt 1 ]; then
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun would set it too, but print a warning; run.threads sets the threads
    fi
    # seconds that processes may take to save after SIGTERM; older versions of torch ignore it and kill after 30 s
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-180}"
    # torchrun would share its store of addresses with the processes, and keep it over restarts (torch 2.13). Restarted
    # processes would find the addresses of dead ones and wait for ever, and a returning machine would never get an address
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # forward SIGUSR1 if this torchrun can. Older ones would die of it and leave their processes running, so ignore it there
    torch="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')"
    if grep -q -e --signals-to-handle "$torch/distributed/run.py"; then
        torchrun+=(--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
    else
        trap '' USR1
    fi
}

# Print the number of visible GPUs, or 1 (the CPU) if there are none.
count_gpus() {
    local count
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        count="$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true)"
    else
        count="$(nvidia-smi -L 2> /dev/null | grep -c '^GPU' || true)"
    fi
    echo $((count > 0 ? count : 1))
}
