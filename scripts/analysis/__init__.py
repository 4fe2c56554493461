"""Know a set and a network: programs that read tables of embeddings."""
