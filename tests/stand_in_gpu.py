"""A GPU that is none: tensors of the CPU that say they lie on cuda, and what a real GPU would refuse to compute with them.

It computes as a CPU does, so whole programs run, of several processes too. Kernels, streams, NCCL and speed are not a GPU's.
"""

import contextlib
import functools
import os
import threading
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
refused: set[str] = set()
_COPIES = ("copy_", "_to_copy")
_TO_BUCKETS = torch.ops.aten.mul.out  # how DDP copies gradients to its buckets, which it makes where nothing is seen
_INDEXED = ("index", "index_put", "index_put_")  # a GPU takes indices of the host


def _tensors(*values: Any) -> list[Tensor]:
    """Do what torch's tree_leaves does, in a fifth of the time, most of that of a run."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found += [] if value.is_meta else [value]
        elif isinstance(value, (tuple, list, dict)):
            found += _tensors(*(value.values() if isinstance(value, dict) else value))
    return found


def _device(value: object) -> torch.device:
    """Return where a tensor lies: its storage has a note if that is the GPU, which lives as long as the storage."""
    return getattr(value.untyped_storage(), "lies_on", HOST) if isinstance(value, Tensor) and not value.is_meta else HOST


def _place(device: Any) -> torch.device:
    return GPU if torch.device(device).type == "cuda" else HOST


def _noted(result: Any, given: list[Tensor], device: torch.device) -> Any:
    """Note where the tensors of a result lie that are no views of those given; return it."""
    before = [tensor.untyped_storage() for tensor in given]
    for storage in (tensor.untyped_storage() for tensor in _tensors(result)):
        if all(storage is not other for other in before):
            storage.lies_on = device  # type: ignore[attr-defined]
    return result


def _refuse(what: str) -> None:
    lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
    own = [line for line in lines if "site-packages" not in line and __file__ not in line and "/lib/python" not in line]
    refused.add(f"{what}: {' < '.join(own[-1:-5:-1])}")


class _Operations(TorchDispatchMode):
    """Follows the devices through all operations."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # to skip it torch imports it: two seconds of each process

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = _tensors(args, kwargs), function.overloadpacket.__name__
        devices = [_device(tensor) for tensor in given]
        # a single number of the host goes with tensors of a GPU
        mixed = len({device for tensor, device in zip(given, devices, strict=True) if tensor.dim() or device == GPU}) > 1
        allowed = name in _COPIES or function == _TO_BUCKETS or (name in _INDEXED and devices[0] == GPU)
        if mixed and not allowed:
            _refuse(f"{name} of {[(tuple(tensor.shape), str(device)) for tensor, device in zip(given, devices, strict=True)]}")
        return _noted(function(*args, **(kwargs or {})), given, GPU if GPU in devices else HOST)


class _Calls(TorchFunctionMode):
    """Answers where a tensor lies, and puts tensors on devices."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, own = dict(kwargs or {}), _device(args[0]) if args else HOST
        if function == Tensor.device.__get__ and own == GPU:
            return GPU
        if function in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):
            return (own == GPU) == (function == Tensor.is_cuda.__get__)
        if function in (Tensor.numpy, Tensor.__array__, Tensor.pin_memory) and own == GPU:
            _refuse(function.__name__)
        if function == Tensor.pin_memory:
            return args[0].clone()
        if function in (Tensor.to, Tensor.cpu):
            return _moved(args[0], own, *(args[1:] if function == Tensor.to else [HOST]), **given)
        if function == Tensor.__deepcopy__:
            return _noted(function(*args), [args[0]], own)
        given.pop("pin_memory", None)
        device = given.get("device")
        if device is None:
            return function(*args, **given)
        given["device"] = HOST if _place(device) == GPU else device
        return _noted(function(*args, **given), _tensors(args), _place(device))


def _moved(tensor: Tensor, own: torch.device, *values: Any, **given: Any) -> Tensor:
    """Do what Tensor.to does."""
    device, rest = given.pop("device", None), []
    given.pop("non_blocking", None)
    for value in values:
        if isinstance(value, Tensor):
            device, rest = _device(value), [*rest, value.dtype]
        elif isinstance(value, (str, torch.device)):
            device = value
        elif value is not None and not isinstance(value, bool):
            rest.append(value)
    changed = tensor.to(*rest, **given) if rest or given else tensor
    if device is None or _place(device) == own:
        return changed
    return _noted(changed.clone() if changed.untyped_storage() is tensor.untyped_storage() else changed, [], _place(device))


class _Idle:
    """A stream or an event: whatever is asked of it, nothing happens."""

    device = GPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    with _Calls(), _Operations():
        yield


def install() -> contextlib.AbstractContextManager[None]:
    """Let this process have that GPU to its end; the context holds it for this thread, others enter by themselves."""
    global GPU
    GPU = _Idle.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    answers = {
        **{"is_available": True, "device_count": 2, "set_device": None, "get_device_capability": (9, 0)},
        **{"synchronize": None, "mem_get_info": (1 << 36, 1 << 36), "max_memory_allocated": 0},
        **{"current_stream": _Idle(), "stream": contextlib.nullcontext(), "device_of": contextlib.nullcontext()},
        "is_current_stream_capturing": False,
        "cudart": SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.cuda.Stream = torch.cuda.Event = _Idle  # type: ignore[assignment,misc]
    Tensor.record_stream = lambda *_: None  # type: ignore[assignment,method-assign]
    tensor_of, autocast, run = torch.as_tensor, torch.autocast, threading.Thread.run
    torch.as_tensor = lambda data, *args, **given: (  # memory that both address
        _noted(torch.frombuffer(data._memory, dtype=torch.uint8), [], GPU)
        if hasattr(data, "_memory")
        else tensor_of(data, *args, **given)
    )
    torch.autocast = lambda kind, *args, **given: autocast("cpu", *args, **given)  # type: ignore[assignment,misc]

    begin, parallel = torch.distributed.init_process_group, DistributedDataParallel.__init__
    torch.distributed.init_process_group = lambda backend, **given: begin("gloo", **given)
    DistributedDataParallel.__init__ = functools.wraps(parallel)(
        lambda *args, **given: parallel(*args, **{**given, "gradient_as_bucket_view": False})
    )
    torch.accelerator.current_accelerator = lambda *_, **__: None  # of a torch for CUDA

    def in_thread(thread: threading.Thread) -> None:
        with _entered():
            run(thread)

    threading.Thread.run = in_thread  # type: ignore[method-assign]
    return _entered()
