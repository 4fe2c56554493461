"""Running the update of the centres beside the backbone's backward pass, on CUDA; on the CPU all runs in order."""

import contextlib
from typing import Any

import torch


class SideStream:
    """A CUDA stream of the head's own, or nothing on other devices.

    Whoever enqueues work on it must keep the tensors that it reads until `wait`: the allocator knows only the main stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: Any = None

    def run(self, keep: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose CUDA work starts after what is enqueued now, and runs beside what is enqueued next.

        Args:
            keep: what holds the tensors that the work reads.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        self._kept = keep
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Let what is enqueued next wait for the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept = None
