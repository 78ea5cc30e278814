"""Methods without transforms: only a head, a head and norm layers, or a whole fine-tuned network."""

from bitgraft.methods.registry import Method, Options, register_method

HEAD = "the backbone as it is, with its own head (feature extractor)"
NORMS = "the backbone's weights as they are; own norm layers and head"
ALL = "every tensor trained (individual network)"

register_method(Method("classifier", HEAD, "W~ = W", Options(norms=False)))
register_method(Method("norms", NORMS, "W~ = W", Options()))
register_method(Method("finetune", ALL, "W~ = W + D", Options(), owns_everything=True))
