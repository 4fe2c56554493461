"""Networks applied to many pictures, and the tables of their embeddings."""
