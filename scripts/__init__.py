"""Programs beside training, each run as `python -m scripts.name` from the root of the repository."""
