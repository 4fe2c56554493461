"""What a head is, beside its margin, its classes and its place among the ranks: one description for the head and its memory."""

from dataclasses import dataclass, field

import torch

from .centres.row_optimizer import RowAdamW, RowOptimizer, RowSGD

EXACT_UP_TO = 1 << 20  # classes whose neighbours are searched exactly; docs/head.md compares the cost with that of training


@dataclass(frozen=True)
class HeadConfig:
    """How a head stores, samples, computes and updates its class centres.

    Args:
        sample_rate: share of the centres in each step's softmax, in (0, 1].
        optimizer: RowSGD or RowAdamW, of the centres.
        storage: "exact", "lean" or "tiny", how centres and moments are stored; see centre_store.py.
        inactive_rows: "keep" leaves the centres that a step did not sample as they are, as in the papers; "decay" does to them
            what a dense optimizer would have done.
        sampling: "uniform", or "neighbours": up to half of the negatives are the classes nearest to the batch's own.
        num_neighbours, neighbours_every: classes kept per class, and optimizer steps between rebuilds of that graph.
        neighbours_search: "exact", "inverted_lists", or "auto" = exact for at most EXACT_UP_TO classes.
        neighbours_probes: lists that each class searches for its neighbours, of four times the root of the number of classes.
        logit_correction: "log_r" adds -log(inclusion probability) to the logits of sampled negatives, so that their sum
            estimates that over all classes; "none" does not, as in the papers.
        focal: gamma of the factor (1 - p)^gamma on each sample's loss; 0 = none. Only for a softmax.
        label_smoothing: the share of the label that is spread evenly over the classes in a sample's softmax, in [0, 1).
        filter_above: negatives with a larger cosine are left out, as likely to be the same person; None = none are.
        matmul_dtype: float32 or bfloat16, of the matrix products; sums are float32.
        wire_dtype: float32 or bfloat16, of the embeddings and their gradients on their way between ranks.
        chunk: centres handled at once; 0 = what suits the device.
        cache_mb: MiB for exponentials that the second pass need not compute again; -1 = as many as there are, within a quarter
            of the free memory.
        kernels: "auto" = C on the CPU and Triton on CUDA where they can be had, otherwise "plain" torch.
        sub_centers: centres of each class, of which a sample sees the nearest; see sub_centers.py.
    """

    sample_rate: float = 1.0
    optimizer: RowOptimizer = field(default_factory=RowSGD)
    storage: str = "exact"
    inactive_rows: str = "keep"
    sampling: str = "uniform"
    num_neighbours: int = 10
    neighbours_every: int = 1000
    neighbours_search: str = "auto"
    neighbours_probes: int = 32
    logit_correction: str = "none"
    focal: float = 0.0
    label_smoothing: float = 0.0
    filter_above: float | None = None
    matmul_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.float32
    chunk: int = 0
    cache_mb: int = -1
    kernels: str = "auto"
    sub_centers: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.sub_centers <= 255  # which of them a sample sees takes one byte
        assert self.sub_centers == 1 or self.sampling == "uniform"  # the graph of neighbours knows one centre for each class

    @property
    def decays(self) -> bool:
        """Whether rows lag behind and are caught up; at rate 1 every row is updated in every step, so none does."""
        return self.inactive_rows == "decay" and self.sample_rate < 1

    @property
    def has_second_moment(self) -> bool:
        """Whether the optimizer keeps a second moment of each centre."""
        return isinstance(self.optimizer, RowAdamW)

    @property
    def counts_updates(self) -> bool:
        """Whether each centre keeps the number of its updates."""
        return self.has_second_moment or self.decays

    def searches_lists(self, num_classes: int) -> bool:
        """Return whether the neighbours of so many classes, over all ranks, are searched by inverted lists."""
        return self.neighbours_search == "inverted_lists" or (self.neighbours_search == "auto" and num_classes > EXACT_UP_TO)
