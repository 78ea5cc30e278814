"""The task file: one safetensors file per task, written whole, checked byte by byte when read.

May import: methods, task, backbone, transforms, errors.
"""
