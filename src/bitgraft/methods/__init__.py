"""Methods: which transform each weight gets, which tensors a task owns, and how it is trained.

May import: task, backbone, transforms, errors.
"""

# isort: off
from bitgraft.methods import masked, packnet, baselines  # noqa: F401  (each registers its methods)
