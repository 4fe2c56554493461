"""RecordIO: the container, its index, image records in it, and writing a set of them."""
