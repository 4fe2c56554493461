"""Class centres: how they are stored, sharded, initialised and updated."""
