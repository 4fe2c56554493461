"""Checkpoints: what one is, how it is written beside training, and how a run goes on from it."""
