"""Task files from a folder, a web address or the Hugging Face Hub into a store, and out to the Hub.

May import: compression, export, store, training, data, network, runtime, format, methods, task, backbone, transforms,
errors.
"""
