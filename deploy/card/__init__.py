"""What a network is, to publish with it."""
