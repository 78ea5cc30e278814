"""One training loop for every method. Start with `loop.fit`; one optimiser step is `loop._Run._step`.

`inputs` and `loader` prepare the data, `init` the task; `learner` computes outputs and losses, `optimizers` updates the
parameters, `evaluation` validates, `checkpoint` saves. `cpu/` only makes training on a CPU faster.

May import: data, network and what is below them.
"""
