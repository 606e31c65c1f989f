"""Where requests come from: a folder of images, or frames that are made up.

A request is one to four images of different sizes.  The same index always gives the same request,
so that the streamed run and the reference see the same pixels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional

from asyncvmm._errors import ArgumentError
from asyncvmm.cli.demo.model import PATCH, SEED

LARGEST = 224
"""Pixels.  Longest side that an image keeps; ViTs are commonly trained at this size."""
MOST_IMAGES = 4
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


class Images(Protocol):
    """A source of images, uint8 of ``[3, height, width]``, sides multiples of ``PATCH``."""

    def get(self, number: int) -> torch.Tensor:
        """Return image ``number``; any number is fine."""


def request(images: Images, index: int) -> list[torch.Tensor]:
    """Return the images of request ``index``."""
    draw = random.Random(SEED * 1_000_003 + index)
    return [images.get(draw.randrange(1 << 30)) for _ in range(draw.randint(1, MOST_IMAGES))]


def grid_of(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows and columns of patches of each image, int64 of ``[images, 2]``."""
    return torch.tensor([[image.shape[1] // PATCH, image.shape[2] // PATCH] for image in images])


def patches(image: torch.Tensor) -> int:
    """Return how many patches, and so tokens, an image has."""
    return (image.shape[1] // PATCH) * (image.shape[2] // PATCH)


class Frames:
    """Made-up frames: smooth noise in sizes from 64 pixels up."""

    def get(self, number: int) -> torch.Tensor:
        """Return frame ``number``."""
        made = torch.Generator().manual_seed(number)
        height, width = (
            int(torch.randint(64 // PATCH, LARGEST // PATCH + 1, (), generator=made)) * PATCH
            for _ in range(2)
        )
        coarse = torch.randint(0, 256, (1, 3, 8, 8), generator=made, dtype=torch.uint8)
        return functional.interpolate(coarse, (height, width))[0]


class Folder:
    """The images of a folder: pictures (with Pillow), ``.npy`` (with numpy) and ``.pt`` files."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ArgumentError(f"--images {folder}: not a folder; give one with images in it")
        known = (*PICTURES, ".npy", ".pt")
        self._paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in known)
        if not self._paths:
            raise ArgumentError(
                f"--images {folder}: none of its files ends in {', '.join(known)}; "
                f"leave the option out to use made-up frames"
            )
        self._loaded: dict[Path, torch.Tensor] = {}

    def get(self, number: int) -> torch.Tensor:
        """Return image ``number``, counted round the folder."""
        path = self._paths[number % len(self._paths)]
        if path not in self._loaded:
            self._loaded[path] = fit(_load(path), path)
        return self._loaded[path]


def fit(image: torch.Tensor, path: Path) -> torch.Tensor:
    """Bring an image to ``[3, height, width]`` uint8 with sides that patches fill."""
    if image.ndim == 2:
        image = image[None]
    if image.ndim == 3 and image.shape[0] not in (1, 3, 4) and image.shape[2] in (1, 3, 4):
        image = image.permute(2, 0, 1)
    if image.ndim != 3 or image.shape[0] not in (1, 3, 4) or min(image.shape[1:]) < 1:
        raise ArgumentError(
            f"{path}: an image has the shape [height, width, 1, 3 or 4] or the same with the "
            f"channels first, got {list(image.shape)}"
        )
    if image.is_floating_point():
        image = image.clamp(0, 1) * 255
    image = image[:3].expand(3, -1, -1).float()
    scale = min(1.0, LARGEST / max(image.shape[1:]))
    sides = [max(1, round(side * scale / PATCH)) * PATCH for side in image.shape[1:]]
    fitted = functional.interpolate(image[None], sides, mode="bilinear", antialias=True)
    return fitted[0].round().clamp(0, 255).to(torch.uint8)


def _load(path: Path) -> torch.Tensor:
    try:
        if path.suffix == ".pt":
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".npy":
            import numpy as np

            loaded = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            loaded = _load_picture(path)
    except ImportError as missing:
        raise ArgumentError(
            f"{path} needs the package {missing.name}: install it, or give a folder of .pt files"
        ) from missing
    except (OSError, ValueError, TypeError, RuntimeError) as broken:
        raise ArgumentError(f"{path} cannot be read as an image: {broken}") from broken
    if not isinstance(loaded, torch.Tensor):
        raise ArgumentError(f"{path} holds a {type(loaded).__name__}, not a tensor")
    return loaded


def _load_picture(path: Path) -> Any:
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB")))
