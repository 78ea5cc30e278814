"""What is read off a pretrained network: its layers, norms and head, its weights, and how to load it.

May import: transforms, errors.
"""
