"""No transforms: a head alone, with norm layers, or a whole network of its own."""

from bitgraft.methods.registry import Method, Options, register_method

register_method(
    Method(
        name="classifier",
        summary="the backbone as it is, a head of its own (feature extractor)",
        equation="W~ = W",
        options=Options(norms=False),
    )
)
register_method(
    Method(
        name="norms",
        summary="the backbone's weights as they are; own norm layers and head",
        equation="W~ = W",
        options=Options(),
    )
)
register_method(
    Method(
        name="finetune",
        summary="every tensor free (individual network)",
        equation="W~ = W + D",
        options=Options(),
        owns_everything=True,
    )
)
