"""Draws the faces of the demo."""
