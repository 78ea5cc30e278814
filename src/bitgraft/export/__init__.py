"""A task as a file for tools that know nothing of bitgraft: plain weights, torch.export programs, ONNX.

May import: store, training, data, network, runtime, format, methods, task, backbone, transforms, errors.
"""
