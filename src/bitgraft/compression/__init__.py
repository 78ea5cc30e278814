"""Compress a fine-tuned copy of a backbone to a task of few bits per weight.

May import: store, training, data, network, runtime, format, methods, task, backbone, transforms, errors.
"""
