"""Verification: pair sets, their embeddings on all ranks, and the numbers of the published protocol."""
