"""One training loop for every method: configuration and presets, learner, optimisers, checkpoints and progress.

What only makes a CPU faster is in `cpu/`. A run's way: loop -> init, loader -> learner -> optimizers -> evaluation.

May import: data, network and what is below them.
"""
