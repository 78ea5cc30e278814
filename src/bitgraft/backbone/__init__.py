"""Backbones: loading them, and finding their layers, norms and head.

May import: transforms, errors.
"""
