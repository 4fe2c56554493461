"""Measures time and memory as ratios against plain baselines, and what fits."""
