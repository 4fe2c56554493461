"""Runs the update of the centres on CUDA in parallel with the backbone's update and its next forward pass.

The backward pass comes before it, because its gradient decides whether anything is updated. On the CPU all runs in order.
"""

import contextlib
from typing import Any

import torch


class SideStream:
    """A separate CUDA stream for the head, or nothing on other devices.

    The tensors that the work on it reads must be kept until `wait`: the allocator tracks only the main stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: Any = None

    def run(self, keep: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose CUDA work starts after the work enqueued so far, in parallel with the work enqueued next.

        Args:
            keep: an object that holds the tensors that the work reads.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        self._kept = keep
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Make the work enqueued next wait for the work of this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept = None
