"""Train, compress and describe tasks in a store, and run them on images.

May import: compression, export, store, training, data, network and what is below them.
"""
