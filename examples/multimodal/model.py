"""The model, its two halves, and the requests: the same in every process, from one seed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

REQUESTS = 4
IMAGE, START, END = 100, 101, 102
"""Tokens: a patch of an image, and what stands before and after one."""

CONFIG: dict[str, Any] = {
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": 103,
}


def device_of(device: str, place: int) -> str:
    """Return the device of a process: all the CPU, or one GPU after the other."""
    return "cpu" if device == "cpu" else f"cuda:{place % torch.cuda.device_count()}"


def make_model(device: str) -> Any:
    """Return the model with the weights that every process makes of the same seed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)  # the model is tiny
    torch.manual_seed(0)
    config: Any = Qwen2_5_VLConfig(**CONFIG)
    config._attn_implementation = "eager"  # the same sums in the same order on every device
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    return model.eval().requires_grad_(False).to(device)


@dataclass(frozen=True)
class Request:
    """A text with three images of different sizes."""

    tokens: torch.Tensor
    pixels: torch.Tensor
    """The patches of all its images, one row each."""
    grids: torch.Tensor
    """Of each image: frames, and patches down and across."""

    def to(self, device: str) -> Request:
        """Return the same on a device."""
        return Request(self.tokens.to(device), self.pixels.to(device), self.grids.to(device))


def make_request(number: int) -> Request:
    """Make up a request; the same one in every process."""
    chance = torch.Generator().manual_seed(number)
    grids = torch.tensor([[1, 4, 4], [1, 4, 2 * number + 8], [1, 8, 6]])
    tokens = torch.randint(3, IMAGE, (10,), generator=chance).tolist()
    for frames, height, width in grids.tolist():
        tokens += [START, *[IMAGE] * (frames * height * width // 4), END]  # four patches a token
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14, generator=chance)
    return Request(torch.tensor([tokens]), pixels, grids)


def encode(model: Any, request: Request) -> tuple[torch.Tensor, ...]:
    """Run the vision tower: the features of each image, one row per token."""
    found = model.model.get_image_features(request.pixels, request.grids, return_dict=True)
    images: tuple[torch.Tensor, ...] = found.pooler_output
    return images


def answer(model: Any, request: Request, images: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Run the language model on a text and the features of its images: logits of every token."""
    encoded = BaseModelOutputWithPooling()
    encoded["pooler_output"] = images
    logits: torch.Tensor = model(
        input_ids=request.tokens,
        image_grid_thw=request.grids,
        mm_token_type_ids=(request.tokens == IMAGE).int(),
        mm_encoder_outputs={"image": encoded},
        use_cache=False,
    ).logits
    return logits


def answer_whole(model: Any, request: Request) -> torch.Tensor:
    """Run all of the model, as it is run where there is one process only."""
    logits: torch.Tensor = model(
        input_ids=request.tokens,
        pixel_values=request.pixels,
        image_grid_thw=request.grids,
        mm_token_type_ids=(request.tokens == IMAGE).int(),
        use_cache=False,
    ).logits
    return logits
