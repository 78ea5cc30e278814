"""No transforms: a head alone, with norm layers, or a whole network of its own."""

from bitgraft.methods.registry import Method, Options, register_method

register_method(
    Method("classifier", "the backbone as it is, a head of its own (feature extractor)", "W~ = W", Options(norms=False))
)
register_method(Method("norms", "the backbone's weights as they are; own norm layers and head", "W~ = W", Options()))
register_method(
    Method("finetune", "every tensor free (individual network)", "W~ = W + D", Options(), owns_everything=True)
)
