"""Class names of the backbone's own head."""

from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from torch import nn

from bitgraft.store import Backbone


def imagenet_names(network: nn.Module, backbone: Backbone) -> tuple[str, ...] | None:
    """Return ImageNet's class names for a pretrained timm network with an ImageNet head, else None."""
    trained = backbone.pretrained or backbone.weights is not None
    subset = infer_imagenet_subset(network) if trained and hasattr(network, "pretrained_cfg") else None
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i).partition(",")[0] for i in range(info.num_classes()))  # type: ignore[no-untyped-call]
