"""A task at work: a private module tree that holds its tensors, and a cache of those.

May import: format, methods, task, backbone, transforms, errors.
"""
