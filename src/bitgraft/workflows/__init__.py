"""From a data set, or a fine-tuned copy, to a task file in a store.

May import: compression, export, store, training, data, network and what is below them.
"""
