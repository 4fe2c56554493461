"""An exponential moving average (EMA) of the backbone's weights, which is evaluated and saved beside the weights.

After good optimizer step number t (from 1), average <- d average + (1 - d) weights with d = min(decay, (1 + t) / (10 + t)): a
new average follows the weights closely, and the more steps it has seen, the longer it remembers (Polyak and Juditsky, 1992, for
the average; the warm-up of d is that of tf.train.ExponentialMovingAverage). BatchNorm's means and variances are averaged in the
same way, since they belong to the averaged weights no less than to the weights; its counters of batches are copied.
"""

import copy

import torch
from torch import Tensor, nn


class WeightAverage:
    """The moving average of a network.

    Args:
        network: whose parameters and buffers are averaged; its names are those of the average.
        decay: d of late steps, in (0, 1).

    Attributes:
        network: the average, in evaluation mode.
        updates: t, () int64 on the device.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._source, self.decay = network, decay
        self.network = copy.deepcopy(network).requires_grad_(False).eval()
        self.updates = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)
        pairs = list(zip(self._tensors(self.network), self._tensors(network), strict=True))
        self._averaged = [(mean, value) for mean, value in pairs if mean.is_floating_point()]

    @staticmethod
    def _tensors(network: nn.Module) -> list[Tensor]:
        return [*network.parameters(), *network.buffers()]

    def begin(self) -> None:
        """Begin again, with the weights as they are now."""
        self.network.load_state_dict(self._source.state_dict())
        self.updates.zero_()

    @torch.no_grad()
    def update(self, good: Tensor) -> None:
        """Take the weights after an optimizer step into the average; on CUDA the host waits for nothing.

        Args:
            good: () bool on the device, whether the step was taken; after one that was skipped nothing changes.
        """
        self.updates += good
        count = self.updates.double()
        share = (1.0 - ((1.0 + count) / (10.0 + count)).clamp(max=self.decay)) * good
        shares = {mean.dtype: share.to(mean.dtype) for mean, _ in self._averaged}
        means, values = map(list, zip(*self._averaged, strict=True))
        torch._foreach_lerp_(means, values, [shares[mean.dtype] for mean in means])

    def state(self) -> dict[str, Tensor]:
        """Return the average as a state dict of the network."""
        counters = {name: value for name, value in self._source.state_dict().items() if not value.is_floating_point()}
        return {**self.network.state_dict(), **counters}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load an average that `state` returned.

        Raises:
            RuntimeError: it is of another network.
        """
        self.network.load_state_dict(state)
