"""Labelled images: find them, split them into train, val and test, and turn them into tensors.

May import: runtime, format, methods, task, backbone, transforms, errors (today errors alone).
"""
