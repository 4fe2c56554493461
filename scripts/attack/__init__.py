"""Robustness tests: a fuzzer for every input, and fault injection for training runs."""
