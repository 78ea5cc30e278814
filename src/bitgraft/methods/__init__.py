"""Every method, as settings of few mechanisms: one file per family, one registry."""

# isort: off
from bitgraft.methods import masked, plain, packnet, adapters, dan  # noqa: F401  (each registers its methods, listed so)
