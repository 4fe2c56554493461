"""Attackers of this project: files that lie, and bad days for trainings."""
