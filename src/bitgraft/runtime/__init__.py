"""Running tasks: the module of a task, a cache of modules, heads, onnxruntime, and identifying an image's task.

May import: format, methods, task, backbone, transforms, errors.
"""
