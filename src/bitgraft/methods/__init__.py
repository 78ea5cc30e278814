"""Every method, as settings of few mechanisms: one file per family, one registry."""

from bitgraft.methods import adapters, dan, masked, packnet, plain  # noqa: F401  (each registers its methods)
