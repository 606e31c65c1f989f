"""A small vision transformer, and the ranks' end of it.

Weights come from a seed, so every process builds the same ones.  All of it runs on one thread per
process: with the same shapes the results are then equal to the last bit, wherever they are made.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

PATCH = 16
"""Pixels per side of a patch; one patch becomes one token."""
WIDTH = 192
"""Features per token: what the encoder sends."""
HIDDEN = 256
"""Width of the ranks' decoder block."""
PROMPT = 16
"""Tokens of text that follow the images of a request."""
SEED = 20_240


def use_one_thread() -> None:
    """Make results of this process comparable bit by bit with another's."""
    torch.set_num_threads(1)


class Block(nn.Module):
    """One transformer block over ``[tokens, width]``."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.before_attention = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.before_widening = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then widen and narrow, each added to what came in."""
        tokens, width = x.shape
        mixed = self.mix(self.before_attention(x)).view(tokens, 3, self.heads, -1)
        query, key, value = mixed.permute(1, 2, 0, 3)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.gather(seen.transpose(0, 1).reshape(tokens, width))
        widened = functional.gelu(self.widen(self.before_widening(x)))
        narrowed: torch.Tensor = self.narrow(widened)
        return x + narrowed


class Encoder(nn.Module):
    """Turn one image into one feature of ``[tokens, WIDTH]``."""

    def __init__(self, depth: int = 3, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block(WIDTH, heads, causal=False) for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, image: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encode a uint8 ``[3, height, width]`` image, into ``out`` if it is given."""
        device = self.last.weight.device
        pixels = image.to(device).float().div(127.5).sub(1.0)
        grid = self.patches(pixels[None])[0]
        x = grid.flatten(1).t() + positions(grid.shape[1] * grid.shape[2], grid.shape[2], device)
        for block in self.blocks:
            x = block(x)
        return torch.addmm(self.last.bias, x, self.last.weight.t(), out=out)


class Rank(nn.Module):
    """What one rank does with a request: a projector, then a decoder block."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(approximate="tanh"), nn.Linear(HIDDEN, HIDDEN)
        )
        self.decode = Block(HIDDEN, heads, causal=True)
        self.prompt = nn.Parameter(torch.randn(PROMPT, HIDDEN))

    def forward(self, features: Sequence[torch.Tensor], grid: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all tokens of one request.

        ``grid`` is int64 of ``[images, 2]``: rows and columns of patches of each image.
        """
        projected = [
            self.project(feature + positions(len(feature), width, feature.device))
            for feature, width in zip(features, grid[:, 1], strict=True)
        ]
        hidden: torch.Tensor = self.decode(torch.cat([*projected, self.prompt]))
        return hidden


def build_encoder(device: str) -> Encoder:
    """Build the encoder with its seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Encoder().eval().to(device)


def build_rank(device: str, shard: int) -> Rank:
    """Build the weights of one shard; ranks that compete all have shard 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + 1 + shard)
        return Rank().eval().to(device)


def warm_up(rank: Rank) -> None:
    """Run a rank once on nothing in particular: the first call is a slow one."""
    device = rank.prompt.device
    with torch.inference_mode():
        rank([torch.zeros(4, WIDTH, device=device)], torch.tensor([[2, 2]], device=device))


def positions(tokens: int, columns: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """Return where each patch of an image lies, as sines and cosines ``[tokens, WIDTH]``.

    ``columns`` may stay on the device: nothing waits for it.
    """
    index = torch.arange(tokens, device=device)
    quarter = WIDTH // 4
    rates = torch.exp(torch.arange(quarter, device=device) * (-6.0 / quarter))
    rows = (index // columns)[:, None] * rates
    places = (index % columns)[:, None] * rates
    return torch.cat([rows.sin(), rows.cos(), places.sin(), places.cos()], dim=1)


def digest(result: torch.Tensor) -> str:
    """Return the SHA-256 of a result's bytes; two equal digests are equal to the last bit."""
    local = result.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(local.data_ptr(), local.nbytes)).hexdigest()
