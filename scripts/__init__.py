"""Programs beside training, each run as `python -m scripts.NAME` from the root of the repository."""
