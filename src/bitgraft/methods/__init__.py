"""Methods: which transform each weight gets, what a task owns outright, and how it is trained. A file per family.

May import: task, backbone, transforms, errors.
"""

# isort: off
from bitgraft.methods import masked, plain, packnet, adapters, dan, lora  # noqa: F401  (each registers its methods)
