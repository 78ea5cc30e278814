"""Export a task for tools without bitgraft: plain weights, torch.export programs, ONNX.

May import: store, training, data, network, runtime, format, methods, task, backbone, transforms, errors.
"""
