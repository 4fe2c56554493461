"""What things cost, as ratios against plain baselines, and what fits."""
