"""Which task an image belongs to, or none: descriptions, scorers over them, and the decision.

It works on features, scores and descriptions alone; `bitgraft.network` gives it the backbone and the tasks.
"""
