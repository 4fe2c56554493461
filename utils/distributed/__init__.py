"""Process groups: the rank of this process, the rendezvous with the others, and errors that all processes raise together.

A single process needs no group and no port: every function here is then the identity. Several processes are started by torchrun
(or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT). Tensors on CUDA go by NCCL, others by gloo.
"""

import contextlib
import datetime
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent import futures
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..machine import num_cores
from ..text import first_line
from .parent import follow_parent

# in errors of NCCL: another process, or the way to it, is gone
_LOST_TO_NCCL = ("ncclRemoteError", "remote process", "ncclSystemError", "communicator was aborted", "operation timeout")
_SILENT = 30.0  # seconds of waiting for the other processes after which a line says so
_timeout: datetime.timedelta | None = None  # of the group of all processes; None = torch's own
_groups: "weakref.WeakValueDictionary[str, dist.ProcessGroup]" = weakref.WeakValueDictionary()  # none may outlive stop()


class SharedError(ValueError):
    """An error that every rank raises with the same message, so that one rank may print it for all."""

    on_all_ranks = True


class RendezvousError(ValueError):
    """The rendezvous failed; another attempt may succeed."""


class LostPeerError(RuntimeError):
    """A collective failed because another process ended; the message names this rank and where all ranks were."""


class World(NamedTuple):
    """The place of this process among all: rank is global, local_rank only selects the device."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    store: Any = None  # the key-value store of the rendezvous, if there are several processes


def init_distributed(device: str, threads: int = 0, timeout_minutes: float = 30.0, setting: str = "run.device=") -> World:
    """Join the other processes if there are any, choose the device, and set the CPU threads.

    Args:
        device: auto, cpu or cuda.
        threads: CPU threads for arithmetic; 0 = share the cores of this machine equally among its processes.
        timeout_minutes: the longest that a process waits for another in a collective.
        setting: the setting of the device, for error messages: the key of a configuration, or "--device ".

    Raises:
        ValueError: the device does not exist, the environment is incomplete, or the rendezvous fails.
    """
    global _timeout
    follow_parent()
    rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ValueError(
            f"environment variable RANK must be below WORLD_SIZE, got RANK={rank} and WORLD_SIZE="
            f"{os.environ.get('WORLD_SIZE') or 'not set'}; unset RANK, or start with torchrun, which sets both"
        )
    local_rank, local_world_size = _from_environment("LOCAL_RANK", 0), _from_environment("LOCAL_WORLD_SIZE", world_size, 1)
    chosen = choose_device(device, local_rank, setting)
    if world_size > 1:  # torchrun sets OMP_NUM_THREADS=1, which would leave most cores idle
        threads = threads or max(1, num_cores() // local_world_size)
    torch.set_num_threads(threads or min(torch.get_num_threads(), num_cores()))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store = None
    if world_size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        timeout = datetime.timedelta(minutes=timeout_minutes)
        address = f"{os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"
        words = f"rank {rank} of {world_size} waits for others at {address}: do all run, with this WORLD_SIZE and address?"
        notice = threading.Timer(_SILENT, print, [words], {"file": sys.stderr})
        notice.name = "notice"
        if local_rank == 0:
            notice.start()
        try:
            # in a thread, as torch waits without end for a server that accepts and is silent
            thread = futures.ThreadPoolExecutor(1, "rendezvous")
            meeting = thread.submit(lambda: next(dist.rendezvous("env://", timeout=timeout)))
            thread.shutdown(wait=False)  # it ends when they have met
            store, _, _ = meeting.result(timeout.total_seconds() + 5)  # torch's own errors come first, and say more
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun of torch 2.13 gives restarted processes the same store. Without a prefix per attempt they would
                # find the addresses of the dead processes. For several machines see scripts/launch/train.py
                store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            elif "TORCHELASTIC_RUN_ID" not in os.environ and (why := _why_not_one_job(store, rank, world_size)):
                raise ValueError(why)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            _timeout = timeout
        except (dist.DistError, RuntimeError, ValueError, futures.TimeoutError) as error:  # in Python 3.10 no TimeoutError
            raise RendezvousError(_explain_rendezvous(error, address)) from None
        finally:
            notice.cancel()
    return World(rank, world_size, local_rank, local_world_size, chosen, store)


def lone_tasks() -> str:
    """Return a line that says so if a launcher started several processes that know nothing of each other, "" otherwise."""
    counts = [os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")]
    if os.environ.get("WORLD_SIZE") or not (several := [count for count in counts if count != "1"]):
        return ""
    return f"srun or mpirun started {several[0]} processes without RANK and WORLD_SIZE: each trains alone, see docs/running.md"


def gloo_group(name: str, timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """Return the further gloo group of this name of all processes. It waits as long as the first one if no timeout is given."""
    if (group := _groups.get(name)) is None:
        dist.all_reduce(torch.zeros(1))  # all are alive and here: to connect has no limit either
        group = _groups[name] = dist.new_group(backend="gloo", timeout=timeout or _timeout)
    return group


def init_local(rank: int, world_size: int, device: str, rendezvous: str) -> World:
    """Join world_size processes of this machine, on cpu or cuda, for programs that start their own processes.

    They meet at `rendezvous`, the path of a file that does not exist yet, the same for all.
    """
    chosen = choose_device(device, rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(max(1, num_cores() // world_size))
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    return World(rank, world_size, rank, world_size, chosen)


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another process ended, so that this rank is not at fault."""
    if "NCCL" in str(error):  # which also reports errors of this rank's device, as out of memory
        return any(word in str(error) for word in _LOST_TO_NCCL)
    return isinstance(error, (dist.DistError, LostPeerError)) or (
        isinstance(error, RuntimeError)
        and any(word in str(error) for word in ("Connection closed by peer", "Connection reset", "gloo"))
    )


@contextlib.contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Run a block on every rank; if it raises ValueError or OSError on any, raise SharedError on all, naming the ranks.

    Any other exception is re-raised on its own rank, after the others are informed. The block itself must not communicate: if
    one rank failed early, the others would wait inside the block.
    """
    message, bug = "", None
    try:
        yield
    except ValueError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except Exception as error:
        message, bug = f"{type(error).__name__}: {error}", error
    messages = all_gather_objects(message, world)
    if bug is not None:
        raise bug
    distinct = {text: [r for r, m in enumerate(messages) if m == text] for text in messages if text}
    if not distinct:
        return
    if len(distinct) == 1 and len(next(iter(distinct.values()))) == world.world_size:
        raise SharedError(next(iter(distinct)))
    raise SharedError("; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in distinct.items()))


def all_gather_objects(value: Any, world: World) -> list[Any]:
    """Return every rank's small picklable value, in rank order. Only for set-up, not for the training step."""
    if world.world_size == 1:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value)
    return values


def all_gather_rows(rows: Tensor, counts: list[int], world: World) -> Tensor:
    """Return the rows (n_r, D) of all ranks concatenated, (sum(counts), D); counts[r] = n_r may differ."""
    if world.world_size == 1:
        return rows
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = rows.new_empty(max(counts) * world.world_size, *rows.shape[1:])
    gather_blocks(gathered, padded)
    blocks = gathered.split(max(counts))
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


def gather_blocks(output: Tensor, block: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill output (world_size * n, ...) with every rank's block (n, ...); torch 2.13 renamed the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, block, group=group)


def scatter_sum(output: Tensor, rows: Tensor) -> None:
    """Fill output (n, ...) with this rank's block of the sum over the ranks of rows (world_size * n, ...)."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, rows)


def any_ranks(flags: Sequence[bool], world: World) -> list[bool]:
    """Return for each flag whether it holds on at least one rank; one collective for all of them."""
    if world.world_size == 1:
        return list(flags)
    shared = torch.tensor([float(flag) for flag in flags])  # on the CPU: the device computes on meanwhile
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [bool(value) for value in shared.tolist()]


def as_data_parallel(backbone: nn.Module, world: World) -> nn.Module:
    """Return the backbone, wrapped so that its gradients are averaged over the ranks if there are several.

    Buffers, such as BatchNorm statistics, differ between the ranks until `broadcast_module`; no training step reads them.
    Views of the buckets save a copy of the gradients (1.23 for 1.30 times a pass that shares nothing, in two CPU processes).
    """
    if world.world_size == 1:
        return backbone
    devices = [world.device] if world.device.type == "cuda" else None
    settings: dict[str, Any] = {"device_ids": devices, "gradient_as_bucket_view": True}
    known = inspect.signature(DistributedDataParallel).parameters
    # its name since torch 2.13, and before
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings[buffers] = False
    make = functools.partial(DistributedDataParallel, backbone, **settings)
    try:
        with _compiler_left_out():
            model = make()
    except AttributeError:  # another version of torch calls something else
        model = make()
    if world.device.type == "cpu" and world.world_size > 2:
        model.register_comm_hook(world.world_size, _mean_in_rank_order)
    return model


@contextlib.contextmanager
def _compiler_left_out() -> Iterator[None]:
    """Tell DDP that torch's compiler is not used, without importing the compiler (see utils.optim)."""
    if "torch._dynamo" in sys.modules:
        yield
        return

    def mode() -> str:
        return "no_optimization"

    answers = SimpleNamespace(get_optimize_ddp_mode=mode, _get_optimize_ddp_mode=mode)
    setattr(torch, "_dynamo", SimpleNamespace(utils=answers, config=answers))  # noqa: B010, to mypy it is a module
    try:
        yield
    finally:
        delattr(torch, "_dynamo")  # torch imports the real one when it is needed


def _mean_in_rank_order(world_size: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, with each number summed in rank order.

    DDP reorders its buckets after the first step of every start. In a ring, the order in which three or more summands are added
    depends on the position in the bucket. So a resumed run would round differently from an uninterrupted one.
    """
    block = bucket.buffer().div_(world_size)
    gathered = block.new_empty(world_size * len(block))
    gather_blocks(gathered, block)
    first, *others = gathered.split(len(block))
    block.copy_(first)
    for other in others:
        block += other
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(block)
    return future


def gradients_shared(model: nn.Module, now: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of a backward pass: average gradients over the ranks now, or accumulate for the last micro-batch."""
    return contextlib.nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()


def broadcast_module(module: nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0, such as BatchNorm statistics, which differ between ranks."""
    if world.world_size == 1:
        return
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)


def broadcast_statistics(module: nn.Module, world: World) -> None:
    """Give every rank the means and variances of rank 0's BatchNorms, and what other buffers have floats, in one message."""
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if world.world_size == 1 or not buffers:
        return
    together = torch.cat([buffer.flatten() for buffer in buffers])
    dist.broadcast(together, src=0)
    for buffer, values in zip(buffers, together.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def _from_environment(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        words = f"must be a whole number from {least} on, got {text!r}; start with python or torchrun"
        raise ValueError(f"environment variable {name} {words}")
    return int(text)


def choose_device(device: str, local_rank: int, setting: str = "--device ") -> torch.device:
    """Return the device of this process: auto takes CUDA if there is a GPU, one per local rank; errors begin with `setting`."""
    available = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError(f"{setting}cuda, but torch sees no CUDA device; choose {setting}cpu or install a CUDA build of torch")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of the {torch.cuda.device_count()} here; start fewer processes on this machine"
        )
    return torch.device("cuda", local_rank)


def _why_not_one_job(store: dist.Store, rank: int, world_size: int) -> str:
    """Return why those who met in the store are not one job, "" if they may be; torch would wait until the timeout."""
    count = store.compare_set("WORLD_SIZE", "", str(world_size)).decode()
    if count != str(world_size):
        return f"WORLD_SIZE is {world_size} here, {count} there; set the same for all, or another MASTER_PORT for another job"
    if store.add(f"RANK {rank}", 1) > 1:
        return f"RANK={rank} is there already; give each process its own, and another job another MASTER_PORT"
    return ""


def _explain_rendezvous(error: Exception, address: str) -> str:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"the processes cannot meet: port {address} is in use by another job; set another MASTER_PORT"
    if isinstance(error, futures.TimeoutError):
        return f"the processes cannot meet: port {address} does not answer; is rank 0 there, or another program?"
    if "connectFullMesh" in text:
        return f"the processes cannot meet at {address}: no way between them; name the interface, GLOO_SOCKET_IFNAME=eth0"
    return f"the processes cannot meet at {address}: {first_line(error):.300}"
