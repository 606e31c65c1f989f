"""Copies into a pool in GPU memory, in as few launches as possible.

One contiguous source is copied by its address: one driver call, where a view of the pool and
torch's own copy of it would take many times as long.  Several of one dtype share one launch of
torch's; what that needs of the pool, a view for each, is kept by address, for a producer that
sends the same shapes comes to the same addresses again and again.  All others (strided,
conjugated, in host memory) are torch's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from asyncvmm._backends.driver import copy
from asyncvmm._errors import BackendError
from asyncvmm._tensors.plan import Layout, Plan, Tensor, refuse_source

TARGETS = 1024
"""Chunks whose views are kept: as many as a pool has slots.  When there are more, all are
forgotten, which costs some 4 us for each feature."""

_SHARED = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    )
)  # fmt: skip
"""The dtypes for which torch has a kernel that copies many tensors at once."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Subclasses may do anything when torch is called with them; their bytes are copied by address."""

_Lists: TypeAlias = tuple[list[Tensor], list[Tensor]]
"""Targets and sources."""


class Launches:
    """Queues the copies into one GPU's pool.

    ``views`` makes tensors over the features of a layout that lie at an address.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Mapping[int, torch.cuda.Stream],
        stream: Callable[[int], torch.cuda.Stream],
        views: Callable[[int, Layout], list[Tensor]],
    ) -> None:
        self._device = device
        self._streams = streams
        self._stream = stream
        self._views = views
        self._targets: dict[tuple[int, Layout], list[Tensor]] = {}

    def queue(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        """Queue the copies of plans to their addresses on ``stream``, which is the current one."""
        chosen = self._streams.get(stream) or self._stream(stream)
        device = self._device
        several = len(plans) > 1 or len(plans[0][1].layout.places) > 1
        shared: dict[torch.dtype, _Lists] = {}
        others: list[tuple[int, Plan, int, Tensor]] = []
        for address, plan in plans:
            layout, tensors = plan.layout, plan.tensors
            here = layout.device == device
            for number, offset, size in layout.places:
                source = tensors[number]
                if not here and source.is_cpu:
                    others.append((address, plan, number, source))
                    continue
                if not here and source.device != device:
                    # Another GPU has no access to the pool, only to this GPU's ordinary memory.
                    source = source.detach().to(device, non_blocking=True)
                else:
                    source.record_stream(chosen)
                start = source.data_ptr()
                if not start or source.nbytes != size:
                    refuse_source(layout.features[number].name, source, size)
                if not source.is_contiguous() or source.is_conj() or source.is_neg():
                    others.append((address, plan, number, source))
                elif several and source.dtype in _SHARED and type(source) in _PLAIN:
                    targets, sources = shared.setdefault(source.dtype, ([], []))
                    targets.append(self._target(address, layout, number))
                    sources.append(source)
                elif not _copied(address + offset, start, size, stream):
                    others.append((address, plan, number, source))
        for dtype in shared:
            _launch(shared[dtype])
        if others:
            self._copy_others(others)

    def _target(self, address: int, layout: Layout, number: int) -> Tensor:
        found = self._targets.get((address, layout))
        if found is None:
            if len(self._targets) >= TARGETS:
                self._targets.clear()
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                found = self._targets[address, layout] = self._views(address, layout)
        return found[number]

    def _copy_others(self, others: Sequence[tuple[int, Plan, int, Tensor]]) -> None:
        """Have torch copy what is strided, conjugated, or in host memory."""
        groups: dict[tuple[object, object], _Lists] = {}
        for address, plan, number, tensor in others:
            source = tensor.detach()
            target = self._target(address, plan.layout, number)
            targets, sources = groups.setdefault((source.dtype, source.device), ([], []))
            targets.append(target)
            sources.append(source)
        for (_, where), lists in groups.items():
            if len(lists[0]) > 1 and where == self._device:
                torch._foreach_copy_(*lists, non_blocking=True)
                continue
            for target, source in zip(*lists, strict=True):
                target.copy_(source, non_blocking=True)


def _launch(lists: _Lists) -> None:
    with torch.no_grad():  # a source may want a gradient; its bytes do not
        torch._foreach_copy_(*lists, non_blocking=True)


def _copied(target: int, source: int, nbytes: int, stream: int) -> bool:
    """Copy between addresses; False in a thread that has never used CUDA, as torch's copy can."""
    try:
        copy(target, source, nbytes, stream)
    except BackendError as error:
        if error.code != "CUDA_ERROR_INVALID_CONTEXT":
            raise
        return False
    return True
