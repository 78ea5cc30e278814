"""Labelled images: finding them, splitting them into train, val and test, and turning them into tensors.

May import: runtime, format, methods, task, backbone, transforms, errors (today errors alone).
"""
