"""From a frozen weight W to a task's weight W~: the paper's equation, its masks, and the compiled loops for a CPU.

May import: errors.
"""
