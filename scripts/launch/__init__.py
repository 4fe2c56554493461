"""Starts runs on one machine, on several, and under Slurm."""
