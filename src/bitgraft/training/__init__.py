"""One training loop for every method: start with `loop.fit`. `cpu/` only makes training on a CPU faster.

May import: data, network and what is below them.
"""
