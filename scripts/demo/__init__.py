"""The drawn faces of the demo."""
