"""What is to be packed: features described, checked and laid out before anything is taken.

Every refusal happens here, before a slot or a byte is touched, and names the feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import msgspec
import torch

from asyncvmm._core.describing import features_bytes
from asyncvmm._core.layout import DTYPES, chunk_bytes, feature_bytes, offsets
from asyncvmm._core.wire import MAX_FEATURES, Feature
from asyncvmm._errors import ArgumentError, InvalidTensorError
from asyncvmm._types import TensorSpec, plain

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


class Layout:
    """Where features of some shapes lie in a chunk of ``nbytes``; never changed, so shared.

    ``device`` is the one that all sources are on; None if they are on several, or there are none.
    """

    __slots__ = (
        "described", "device", "features", "nbytes", "numbers", "offsets", "places", "sizes",
    )  # fmt: skip

    def __init__(
        self, features: list[Feature], sizes: list[int], device: torch.device | None = None
    ) -> None:
        self.described = features_bytes(features)
        """Bytes that the features take in a message."""
        self.features = features
        self.sizes = sizes
        self.offsets = offsets(sizes)
        self.nbytes = chunk_bytes(sizes)
        self.device = device
        self.numbers = {feature.name: number for number, feature in enumerate(features)}
        self.places = [
            (number, offset, size)
            for number, (offset, size) in enumerate(zip(self.offsets, sizes, strict=True))
            if size
        ]
        """(number, offset, bytes) of each feature that has bytes."""


class Plan(msgspec.Struct, eq=False):
    """Features of one owner, laid out, with the tensors to be copied in (none if reserved).

    A struct, because one is made for every owner.
    """

    layout: Layout
    nbytes: int
    tensors: Sequence[Tensor] = ()


_layouts: dict[tuple[object, ...], Layout] = {}
"""Layouts by names, dtypes, shapes and devices: a producer sends the same few again and again."""

_STRIDED = torch.strided

_LAYOUTS = 512
"""How many are kept; when they are more, all are forgotten, which costs a few microseconds each."""


def plan_tensors(features: Mapping[str, Tensor]) -> Plan:
    """Describe tensors that are to be copied in; refuse what cannot be shared."""
    if type(features) is not dict:
        if not isinstance(features, Mapping):
            raise _no_mapping(features)
        features = dict(features)  # looked up once: who knows what comes the second time
    tensors = (*features.values(),)
    facts: list[object] = [*features]  # not a tuple: that is copied by each +=
    try:
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.layout is not _STRIDED:
                _describe(features)  # names the one
            facts += (tensor.dtype, tensor.shape, tensor.device)
        layout = _layouts.get(key := (*facts,))
    except (TypeError, RuntimeError):  # a name that is no text, or no one shape
        _describe(features)  # says which
        raise
    if layout is None:
        layout = _remember(key, _describe(features))
    return Plan(layout, layout.nbytes, tensors)


def _remember(key: tuple[object, ...], layout: Layout) -> Layout:
    if len(_layouts) >= _LAYOUTS:
        _layouts.clear()
    _layouts[key] = layout
    return layout


def _describe(features: Mapping[str, Tensor]) -> Layout:
    described = []
    sizes = []
    for name, tensor in _items(features):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTensorError(
                f"feature {name!r} is a {type(tensor).__name__}, not a torch.Tensor; convert it "
                f"first, for example with torch.as_tensor",
                feature=name,
            )
        found = NAMES.get(tensor.dtype)
        if found is None or tensor.layout is not torch.strided or not _has_bytes(tensor):
            raise _refusal(name, tensor)
        shape = tuple(tensor.shape)
        sizes.append(feature_bytes(name, found[0], shape))
        described.append(Feature(name, found[0], shape))
    devices = {tensor.device for tensor in features.values()}
    return Layout(described, sizes, devices.pop() if len(devices) == 1 else None)


def _has_bytes(tensor: Tensor) -> bool:
    return not tensor.is_meta and not tensor.is_nested


def refuse_source(name: str, tensor: Tensor, nbytes: int) -> NoReturn:
    """Refuse a tensor that cannot be read at the time of its copy.

    One without memory (a fake tensor, or a storage that was resized to nothing) would end the
    process; one that changed since it was described would be read past its end.
    """
    if not tensor.data_ptr():
        raise InvalidTensorError(
            f"feature {name!r} has no memory behind it: a fake tensor, or one whose storage was "
            f"resized to 0 bytes; materialise it first",
            feature=name,
        )
    raise InvalidTensorError(
        f"feature {name!r} had {nbytes:,} bytes when it was sent and has {tensor.nbytes:,} "
        f"now; leave a tensor alone until send() returns",
        feature=name,
    )


def plan_specs(features: Mapping[str, TensorSpec]) -> Plan:
    """Describe features that the caller will write in place."""
    key: tuple[object, ...] | None = None
    try:
        key = (*features, *[(spec.shape, spec.dtype) for spec in features.values()])
        layout = _layouts.get(key)
    except (AttributeError, TypeError):  # no mapping, no spec, or no name
        layout = None
    if layout is None:
        layout = _describe_specs(features)
        if key is not None:
            _remember(key, layout)
    return Plan(layout, layout.nbytes)


def _describe_specs(features: Mapping[str, TensorSpec]) -> Layout:
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
    return Layout(described, sizes)


def _items(features: Mapping[str, object]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if not isinstance(features, Mapping):
        raise _no_mapping(features)
    if not features:
        raise ArgumentError("an owner needs at least one feature; got an empty mapping")
    if len(features) > MAX_FEATURES:
        raise ArgumentError(
            f"an owner may have at most {MAX_FEATURES} features, got {len(features)}; send "
            f"them as several owners"
        )
    name: object
    for name, feature in features.items():
        if not isinstance(name, str) or not 0 < len(name) <= 1024:
            raise ArgumentError(
                f"a feature's name is text of 1 to 1,024 characters, got {name!r:.80}"
            )
        found.append((plain(name), feature))
    return found


def _refusal(name: str, tensor: Tensor) -> InvalidTensorError:
    if tensor.is_meta:
        why = "is on the meta device and has no bytes; materialise it first"
    elif tensor.is_nested:
        why = "is nested and has no one shape; send its parts, or .values() and .offsets()"
    elif tensor.layout is not torch.strided:
        why = f"has layout {tensor.layout}; convert it with .to_dense() or send its parts"
    else:
        why = (
            f"has dtype {tensor.dtype}, whose bytes alone do not say its values; "
            f"send the parts of a quantised tensor as features of their own"
        )
    return InvalidTensorError(f"feature {name!r} {why}", feature=name)


def _no_mapping(features: object) -> ArgumentError:
    return ArgumentError(
        f"features must be a mapping of names to tensors, got a {type(features).__name__}; for "
        f"one tensor give {{'name': tensor}}"
    )
