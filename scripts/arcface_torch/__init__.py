"""From arcface_torch and back: configurations and checkpoints."""
