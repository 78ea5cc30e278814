"""What only makes training on a CPU faster. Nothing outside `training` knows of it.

May import: transforms, errors.
"""
