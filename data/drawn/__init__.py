"""Synthetic faces, drawn from the parameters of an identity."""
