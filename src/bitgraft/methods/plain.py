"""The two ends: nothing but a head, and a whole network of its own."""

from bitgraft.methods.registry import Method, Options, register_method

CLASSIFIER = register_method(
    Method(
        name="classifier",
        summary="the backbone as it is, a head of its own (feature extractor)",
        equation="W~ = W",
        options=Options(norms=False),
    )
)
FINETUNE = register_method(
    Method(
        name="finetune",
        summary="every tensor free (individual network)",
        equation="W~ = W + D",
        options=Options(),
        owns_everything=True,
    )
)
