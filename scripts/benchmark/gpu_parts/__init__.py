"""The parts of scripts.benchmark.gpu: each measures one thing in a process of its own, and yields its figures case by case."""
