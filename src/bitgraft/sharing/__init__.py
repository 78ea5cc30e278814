"""Pull task files from a folder, a URL or the Hugging Face Hub into a store, and push them to the Hub.

May import: compression, export and what is below them.
"""
