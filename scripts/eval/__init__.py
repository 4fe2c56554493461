"""Scoring networks beyond python -m eval, and comparing runs."""
