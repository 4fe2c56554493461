"""From weights to use: faces in photographs, tables of embeddings, galleries, exported networks, cards, and a page."""
