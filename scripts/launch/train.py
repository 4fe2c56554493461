"""Train a network: face train CONFIG [section.key=value ...]

CONFIG is the name of a file in configs/, or a path. Every key of configs/base.yaml can be set behind it.

One process trains on each visible GPU, one where there is none. Several are started as torchrun does: after one died, all
restart from the newest checkpoint. On several machines, start the same command on each of them, in any order, within ten
minutes; run.output must be a folder that all of them share. A lost machine rejoins with the same command.

Environment, with several processes: TORCH_ELASTIC_SHUTDOWN_TIMEOUT is the seconds to save after SIGTERM before SIGKILL
(default 180). NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME are the network interface, such as eth0, for GPUs and for CPUs.

Examples:
  face train ms1mv3_r50 data.path=/data/ms1m-retinaface-t1 optimizer.lr=0.05 train.epochs=2
  face train ms1mv3_r50 data.path=/data/ms1m-retinaface-t1 --check
  face train configs/mine.yaml --processes 2
  face train wf42m_pfc02_16gpus_r100 data.path=/data/webface42m --machines 2 --head gpu01
"""

import argparse
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from configs import load_config
from utils.cli import int_in_range, make_parser
from utils.program import run_main

from . import torchrun

_ROOT = Path(__file__).parents[2]
_PORT = 29500


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face train", __doc__)
    parser.add_argument("config", help="name of a file in configs/, such as demo_cpu, or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="such as optimizer.lr=0.05")
    parser.add_argument("--print-config", action="store_true", help="print the merged configuration and stop")
    parser.add_argument("--check", action="store_true", help="do what comes before the first step, without a run folder")
    parser.add_argument("--processes", "--gpus", type=int_in_range(1, 1024), metavar="N", help="default: one per GPU, or 1")
    parser.add_argument("--restarts", type=int_in_range(0, 1000), metavar="N", help="on a crash; default 3, for one process 0")
    parser.add_argument("--machines", type=int_in_range(1, 10_000), metavar="N", help="number of machines (default: 1)")
    parser.add_argument("--head", metavar="HOST[:PORT]", help=f"one of the machines; its port (default {_PORT}) must be free")
    parser.add_argument("--run-id", metavar="NAME", help="what tells runs on one head apart; default: run.name")
    parser.add_argument("--is-head", choices=("yes", "no"), help="whether this machine is --head; default: by its address")
    return run_main(run, parser.parse_intermixed_args(arguments))


def run(options: argparse.Namespace) -> int | None:
    """Train in this process, or check once and then train in several; return the exit status."""
    # with RANK, torchrun or Slurm has started this process
    several = [] if options.print_config or "RANK" in os.environ else _torchrun_arguments(options)
    return importlib.import_module("train").run(options) if options.check or not several else _start(several, options)


def _start(several: list[str], options: argparse.Namespace) -> int:
    # the check so that a mistake is one line, and not one for each process and restart. A fork need not import torch again
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    check = context.Process(target=_check, args=(options,))
    check.start()
    check.join()
    if check.exitcode:
        return 1
    if options.machines > 1:
        print(f"waiting at {options.head} for all {options.machines} machines, at most ten minutes", file=sys.stderr)
    return torchrun.main([*several, str(_ROOT / "train.py"), options.config, *options.overrides])


def _check(options: argparse.Namespace) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who waits for this process says that it was interrupted
    options.check = True
    sys.exit(run_main(importlib.import_module("train").run, options))


def _torchrun_arguments(options: argparse.Namespace) -> list[str]:
    """Return torchrun's options, and set the environment of the processes; [] if one process without restarts will do."""
    run = load_config(options.config, options.overrides).run
    processes = options.processes = options.processes or (1 if run.device == "cpu" else count_gpus())
    for name, value in (("head", options.head), ("run-id", options.run_id), ("is-head", options.is_head)):
        if value and options.machines is None:
            raise ValueError(f"--{name} is for several machines; add --machines N, or take --{name} out")
    options.machines = options.machines or 1
    if options.machines > 1 and not options.head:
        raise ValueError("--head must be the HOST[:PORT] of one of the machines, the same on all of them")
    if processes == 1 and options.machines == 1 and not options.restarts:
        return []
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it too, with a warning; run.threads sets the threads
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "180")  # older versions of torch ignore it and kill after 30 s
    # torchrun would share its store of addresses with the processes, and keep it over restarts (torch 2.13). Restarted
    # processes would find the addresses of dead ones and wait for ever, and a returning machine would never get an address
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    restarts = 3 if options.restarts is None else options.restarts
    arguments = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    if torchrun.can_forward_signals():
        hangup = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else "SIGHUP,"  # ignored: nohup, so it goes on
        arguments.append(f"--signals-to-handle=SIGTERM,SIGINT,{hangup}SIGQUIT,SIGUSR1")
    else:  # it would die of SIGUSR1 and leave its processes running
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        socket.getaddrinfo("localhost", None)  # where torchrun looks for a free port, also with several machines
    except OSError:
        raise ValueError("--processes: localhost has no address here; write 127.0.0.1 localhost into /etc/hosts") from None
    if options.machines == 1:
        return [*arguments, "--standalone", "--local-addr=localhost"]  # the name of this machine may have no address
    host, port, is_head, own = find_head(options.head)  # which may start last: read_timeout
    here = options.is_head == "yes" if options.is_head else is_head
    arguments += [f"--nnodes={options.machines}", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}"]
    arguments += [f"--rdzv-conf=is_host={int(here)},read_timeout=600", f"--rdzv-id={options.run_id or run.name}"]
    return [*arguments, f"--local-addr={own}"] if own else arguments


def count_gpus() -> int:
    """Return the number of visible GPUs, or 1 if there are none, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 1
    return max(1, sum(line.startswith("GPU") for line in said.splitlines()))


def find_head(head: str) -> tuple[str, int, bool, str]:
    """Return host and port of --head, whether this machine has its address, and the address that reaches it, "" if loopback.

    torchrun compares names for that, and sends its host name to the others. Both fail if names and addresses disagree.

    Raises:
        ValueError: the port is no number, or the host has no address here or cannot be reached.
    """
    host, colon, number = head.partition(":")
    if colon and not (number.isdecimal() and 0 < int(number) < 1 << 16):
        raise ValueError(f"--head: the port must be a number from 1 to 65535, got {head!r}")
    port = int(number) if colon else _PORT
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ValueError(f"--head: no address for {host} here ({error.strerror}); use a name that all machines know") from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0))
            is_head = True
        except OSError:
            is_head = False
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket: connect sends nothing
        try:
            probe.connect(address)
        except OSError as error:
            raise ValueError(f"--head: no way from here to {host} ({error.strerror})") from None
        own = str(probe.getsockname()[0])
    return host, port, is_head, "" if own.startswith("127.") or own == "::1" else own


if __name__ == "__main__":
    raise SystemExit(main())
