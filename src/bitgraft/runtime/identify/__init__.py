"""Identify the task of an image, or none: descriptions of tasks, scorers, and the decision.

It works on features, scores and descriptions. `bitgraft.network` provides the backbone and the tasks.
"""
