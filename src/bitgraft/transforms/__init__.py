"""Weight transforms: from a frozen weight W to a task's weight W~.

May import: errors.
"""
