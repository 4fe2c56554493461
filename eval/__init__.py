"""Verification: pair sets, their embeddings over all ranks, and the numbers of the published protocol."""
