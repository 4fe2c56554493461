"""A page on this machine to try a network on."""
