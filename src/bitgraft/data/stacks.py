"""Images that are in memory already, as one array."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitgraft.errors import DataError

_CHANNELS = (1, 3, 4)


class Stack:
    """Images of one size in one uint8 tensor (N, H, W) or (N, H, W, C); torch shares it with workers."""

    def __init__(self, images: Tensor | NDArray[Any]) -> None:
        self.pixels = _eight_bits(_channels_last(images))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.pixels[index].numpy())


def _channels_last(images: Tensor | NDArray[Any]) -> Tensor:
    """(N, H, W) or (N, H, W, C), whichever way it came; where both ways fit, numpy means NHWC and torch NCHW."""
    torchwise = isinstance(images, Tensor)
    tensor = images.detach().cpu() if isinstance(images, Tensor) else _as_tensor(images)
    if tensor.ndim == 3:
        return tensor
    if tensor.ndim == 4:
        last, first = tensor.shape[3] in _CHANNELS, tensor.shape[1] in _CHANNELS
        if first and (torchwise or not last):
            tensor, last = tensor.permute(0, 2, 3, 1), True
        if last:
            return tensor[..., 0] if tensor.shape[3] == 1 else tensor
    raise DataError(
        f"an array of images has shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels, "
        f"not {tuple(tensor.shape)}"
    )


def _as_tensor(images: NDArray[Any]) -> Tensor:
    array = np.asarray(images)
    if array.dtype == object:
        raise DataError("the images differ in size, so they are no array: save them as files or pass a Dataset")
    if not array.flags.writeable or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


def _eight_bits(images: Tensor) -> Tensor:
    """uint8 as it is; 16 bits by their high byte, as files are read; floats from 0 to 1; true is white."""
    if images.dtype == torch.uint8:
        return images
    if images.dtype == torch.uint16:
        return images.to(torch.int32).bitwise_right_shift_(8).to(torch.uint8)
    if images.dtype == torch.bool:
        return images.to(torch.uint8) * 255
    if images.is_floating_point():
        low, high = images.aminmax() if images.numel() else (0.0, 1.0)
        if not (low >= 0 and high <= 1):
            raise DataError(
                f"images in floating point must lie between 0 and 1, but these go from {low:.4g} to {high:.4g}: "
                "scale them, or make uint8 of them; images that are normalised already go to fit as a Dataset"
            )
        return (images * 255).round_().to(torch.uint8)
    raise DataError(f"images are uint8, uint16, bool or floats from 0 to 1, not {images.dtype}: convert them first")
