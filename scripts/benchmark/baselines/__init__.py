"""The usual implementations of the same work, as baselines of the benchmarks."""
