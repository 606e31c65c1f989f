"""What is to be packed: features described, checked and laid out before anything is taken.

Every refusal happens here, before a slot or a byte is touched, and names the feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from asyncvmm._core.layout import DTYPES, chunk_bytes, feature_bytes, offsets
from asyncvmm._core.wire import MAX_FEATURES, Feature
from asyncvmm._errors import ArgumentError, InvalidTensorError
from asyncvmm._types import TensorSpec

if TYPE_CHECKING:
    Tensor: TypeAlias = torch.Tensor
else:
    Tensor = torch.Tensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The dtypes that can be shared and that this torch knows, by name."""

NAMES: dict[torch.dtype, tuple[str, int]] = {
    dtype: (name, DTYPES[name]) for name, dtype in TORCH_DTYPES.items()
}


class Plan:
    """Features of one owner, laid out in one chunk of ``nbytes``."""

    __slots__ = ("features", "nbytes", "sizes", "tensors")

    def __init__(
        self, features: list[Feature], sizes: list[int], tensors: Sequence[Tensor] = ()
    ) -> None:
        if not features:
            raise ArgumentError("an owner needs at least one feature; got an empty mapping")
        if len(features) > MAX_FEATURES:
            raise ArgumentError(
                f"an owner may have at most {MAX_FEATURES} features, got {len(features)}; send "
                f"them as several owners"
            )
        self.features = features
        self.sizes = sizes
        self.tensors = tensors
        self.nbytes = chunk_bytes(sizes)

    @property
    def offsets(self) -> list[int]:
        """Where each feature starts, in bytes from the start of the chunk."""
        return offsets(self.sizes)


def plan_tensors(features: Mapping[str, Tensor]) -> Plan:
    """Describe tensors that are to be copied in; refuse what cannot be shared."""
    described = []
    sizes = []
    tensors = []
    for name, tensor in _items(features):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTensorError(
                f"feature {name!r} is a {type(tensor).__name__}, not a torch.Tensor; convert it "
                f"first, for example with torch.as_tensor",
                feature=name,
            )
        found = NAMES.get(tensor.dtype)
        if found is None or tensor.layout is not torch.strided or tensor.is_meta:
            raise _refusal(name, tensor)
        described.append(Feature(name, found[0], tuple(tensor.shape)))
        sizes.append(tensor.numel() * found[1])
        tensors.append(tensor)
    return Plan(described, sizes, tensors)


def plan_specs(features: Mapping[str, TensorSpec]) -> Plan:
    """Describe features that the caller will write in place."""
    described = []
    sizes = []
    for name, spec in _items(features):
        if not isinstance(spec, TensorSpec):
            raise InvalidTensorError(
                f"feature {name!r} is a {type(spec).__name__}; reserve() takes "
                f"asyncvmm.TensorSpec(shape, dtype), send() takes tensors",
                feature=name,
            )
        dtype = spec.dtype_name
        sizes.append(feature_bytes(name, dtype, spec.shape))
        if dtype not in TORCH_DTYPES:
            raise InvalidTensorError(
                f"feature {name!r} has dtype {dtype}, which torch {torch.__version__} lacks",
                feature=name,
            )
        described.append(Feature(name, dtype, spec.shape))
    return Plan(described, sizes)


def _items(features: Mapping[str, object]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if not isinstance(features, Mapping):
        raise ArgumentError(
            f"features must be a mapping of names to tensors, got a {type(features).__name__}; "
            f"for one tensor give {{'name': tensor}}"
        )
    name: object
    for name, feature in features.items():
        if not isinstance(name, str) or not 0 < len(name) <= 1024:
            raise ArgumentError(
                f"a feature's name is text of 1 to 1,024 characters, got {name!r:.80}"
            )
        found.append((name, feature))
    return found


def _refusal(name: str, tensor: Tensor) -> InvalidTensorError:
    if tensor.is_meta:
        why = "is on the meta device and has no bytes; materialise it first"
    elif tensor.layout is not torch.strided:
        why = f"has layout {tensor.layout}; convert it with .to_dense() or send its parts"
    else:
        why = (
            f"has dtype {tensor.dtype}, whose bytes alone do not say its values; "
            f"send the parts of a quantised tensor as features of their own"
        )
    return InvalidTensorError(f"feature {name!r} {why}", feature=name)
