"""What a table of embeddings says about a set and a network: labels, clusters, all pairs, groups of people, quality."""
