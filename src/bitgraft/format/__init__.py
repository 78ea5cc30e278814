"""The task file: one safetensors file per task, written atomically and fully checked when read.

May import: methods, task, backbone, transforms, errors.
"""
