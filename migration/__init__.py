"""Checkpoints and configurations of arcface_torch."""
