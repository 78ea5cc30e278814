"""Methods: which transform each weight gets, which tensors a task owns, and how it is trained. One file per family.

May import: task, backbone, transforms, errors.
"""

# isort: off
from bitgraft.methods import masked, plain, packnet, adapters, dan, lora  # noqa: F401  (each registers its methods)
