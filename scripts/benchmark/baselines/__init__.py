"""How the same work is usually written, for the benchmarks to compare with."""
