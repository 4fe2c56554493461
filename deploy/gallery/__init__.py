"""People, their pictures and embeddings on disk, and the search among them."""
