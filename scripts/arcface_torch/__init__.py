"""Converts configurations and checkpoints from and to arcface_torch."""
