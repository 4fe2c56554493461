"""Scores networks on further protocols, and compares runs."""
