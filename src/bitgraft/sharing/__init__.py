"""Pull task files from a folder, a URL or the Hugging Face Hub into a store, and push them to the Hub.

May import: compression, export, store, training, data, network, runtime, format, methods, task, backbone, transforms,
errors.
"""
