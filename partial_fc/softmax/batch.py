"""What the parts of the head tell each other of a micro-batch.

Shapes: B = samples of the global micro-batch, D = embedding size. Symbols are those of passes.py.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:  # parts do not import one another
    from losses.negatives import Negatives

State = dict[str, Tensor]  # what a margin knows of a micro-batch; see losses/margin.py


class Batch(NamedTuple):
    """One global micro-batch, as the two passes need it.

    Args:
        unit: (B, D) fp32.
        norm: (B,) of the embeddings, fp32.
        target_cosine: (B,) fp32.
        places: (B,) int64, of the target classes; see planning.py.
        state: what margin.observe returned.
        function: of the negatives, for the kernel `weights`; None = the fast path, the margin's scale times the cosine.
        nearest: which of its class's centres each sample sees, (B,) int64, 0 if the class lies in another shard; None if a
            class has one.
    """

    unit: Tensor
    norm: Tensor
    target_cosine: Tensor
    places: Tensor
    state: State
    function: "Negatives | None" = None
    nearest: Tensor | None = None


class ShardSums(NamedTuple):
    """What the forward pass adds up over the active classes of a shard but the target, fp32.

    Args:
        sums: (3, B), as the kernel `weights` defines them; the first is Z, or the sum of a "sum" link's losses.
        u: (B, D); on the fast path not yet multiplied by the scale, see TwoPass.gain.
        shift: K of Z and U, one number, or (B,) of this shard.
        spread: for label smoothing: (2, B) the number of negatives and the sum of their logits.
        slopes: for label smoothing: (B, D) sum_j dz/dcos w_j. If dz/dcos is the same for all classes, (D,) sum_j w_j instead,
            which includes the target class.
    """

    sums: Tensor
    u: Tensor
    shift: float | Tensor
    spread: Tensor | None = None
    slopes: Tensor | None = None


class Pull(NamedTuple):
    """What the update pass needs of a micro-batch: how strongly each sample pulls at the classes, all (B,) fp32.

    Args:
        batch: the micro-batch.
        negatives: factor of the sample in the gradients of negatives. It includes exp(K - lse) unless `lse` is given.
        target: dL/d(target cosine).
        lse: where K differs between chunks.
        less: S_i / negatives_i where label smoothing asks for weights of their own.
        even: S_i dz/dcos for label smoothing of linear negatives.
    """

    batch: Batch
    negatives: Tensor
    target: Tensor
    lse: Tensor | None = None
    less: Tensor | None = None
    even: Tensor | None = None

    def times(self, share: float) -> "Pull":
        """Return the pull of a loss that is multiplied by share."""
        even = None if self.even is None else self.even * share
        return self._replace(negatives=self.negatives * share, target=self.target * share, even=even)

    @property
    def whole_target(self) -> Tensor:
        """The pull at the target class (B,), where that at all classes together is taken back."""
        return self.target if self.even is None else self.target + self.even
