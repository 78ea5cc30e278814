"""Turn records of runs into the paper's tables and figures.

May import: what paper may, but not paper/bench.
"""
