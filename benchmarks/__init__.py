"""`make bench`: what bitgraft costs, each figure a ratio against the obvious other way, measured side by side."""
