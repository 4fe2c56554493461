"""Programs that make, check and change sets."""
