"""Write part of Fashion-MNIST, from Debian's package `dataset-fashion-mnist`, as an image folder.

python -m benchmarks.fashion DATA/fashion      # always the same 6,000 training and 2,000 test images
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SOURCE = Path("/usr/share/datasets/fashion-mnist")
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def read_idx(path: Path, header: int) -> NDArray[np.uint8]:
    """Return the bytes of a gzipped IDX file after its header."""
    return np.frombuffer(gzip.decompress(path.read_bytes())[header:], np.uint8)


def write_split(source: Path, prefix: str, folder: Path, count: int) -> None:
    """Write the first `count` images, which are already shuffled, as PNG files by class."""
    images = read_idx(source / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    labels = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz", 8)
    for number in range(count):
        place = folder / CLASSES[labels[number]] / f"{number:05d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path, default=SOURCE, help="Debian's folder [%(default)s]")
    arguments = parser.parse_args()
    if not arguments.source.is_dir():
        parser.error(f"there is no {arguments.source}: apt install dataset-fashion-mnist")
    write_split(arguments.source, "train", arguments.folder / "train", 6000)
    write_split(arguments.source, "t10k", arguments.folder / "test", 2000)


if __name__ == "__main__":
    main()
