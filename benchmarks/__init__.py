"""`make bench`: the cost of bitgraft as ratios to plain baselines, measured side by side."""
