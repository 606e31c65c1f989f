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
from asyncvmm._tensors.plan import TORCH_DTYPES, Layout, Plan, Tensor, refuse_source

TARGETS = 1024
"""Chunks whose views are kept: as many as a pool has slots.  When there are more, all are
forgotten, which costs some 4 us for each feature."""

SHARED_BYTES = 4 << 20
"""A launch takes 20 MiB (320 pieces of 65,536 elements, here of one byte), so larger features gain
nothing from sharing one."""

_CARRIERS = {
    torch.bool: torch.uint8, torch.uint8: torch.uint8, torch.int8: torch.uint8,
    torch.int16: torch.int16, torch.float16: torch.int16, torch.bfloat16: torch.int16,
    torch.int32: torch.int32, torch.float32: torch.int32,
    torch.int64: torch.int64, torch.float64: torch.int64, torch.complex64: torch.int64,
}  # fmt: skip
"""The dtypes that share launches, and as what they are copied: torch copies many tensors of a
16-bit float by way of a 32-bit one, which changes the bits of a signalling NaN."""

_Target: TypeAlias = tuple[Tensor | None, torch.dtype]
"""Where a feature goes, as its carrier; None if it shares no launch."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Subclasses may do anything when torch is called with them; their bytes are copied by address."""


class Launches:
    """Queues the copies into one GPU's pool.

    ``view`` makes a tensor over one feature of a layout that lies at an address.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Mapping[int, torch.cuda.Stream],
        stream: Callable[[int], torch.cuda.Stream],
        view: Callable[[int, Layout, int], Tensor],
    ) -> None:
        self._device = device
        self._streams = streams
        self._stream = stream
        self._view = view
        self._targets: dict[tuple[int, Layout], list[_Target]] = {}

    def queue(self, plans: Sequence[tuple[int, Plan]], stream: int) -> None:
        """Queue the copies of plans to their addresses on ``stream``, which is the current one."""
        chosen = self._streams.get(stream) or self._stream(stream)
        device = self._device
        several = len(plans) > 1 or len(plans[0][1].layout.places) > 1
        shared: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        others: list[tuple[int, Plan, int, Tensor]] = []
        found: list[_Target] = []
        for address, plan in plans:
            layout, tensors = plan.layout, plan.tensors
            here = layout.device == device
            if several:
                found = self._targets.get((address, layout)) or self._find(address, layout)
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
                    continue
                if several:
                    target, carrier = found[number]
                    if target is not None and type(source) in _PLAIN:
                        if carrier not in shared:
                            shared[carrier] = ([], [])
                        targets, sources = shared[carrier]
                        targets.append(target)
                        sources.append(source)
                        continue
                if not _copied(address + offset, start, size, stream):
                    others.append((address, plan, number, source))
        for carrier, lists in shared.items():
            _launch(carrier, *lists)
        for address, plan, number, tensor in others:
            target = self._view(address, plan.layout, number)
            target.copy_(tensor.detach(), non_blocking=True)

    def _find(self, address: int, layout: Layout) -> list[_Target]:
        """Return where the features of a chunk go, and remember it."""
        if len(self._targets) >= TARGETS:
            self._targets.clear()
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            found = [self._target(address, layout, at) for at in range(len(layout.features))]
        self._targets[address, layout] = found
        return found

    def _target(self, address: int, layout: Layout, number: int) -> _Target:
        dtype = TORCH_DTYPES[layout.features[number].dtype]
        carrier = _CARRIERS.get(dtype)
        if carrier is None or not 0 < layout.sizes[number] <= SHARED_BYTES:
            return None, dtype
        return self._view(address, layout, number).view(carrier), carrier


def _launch(carrier: torch.dtype, targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():  # a source may want a gradient; its bytes do not
        carried = [
            source if source.dtype is carrier else source.view(carrier) for source in sources
        ]
        torch._foreach_copy_(targets, carried, non_blocking=True)


def _copied(target: int, source: int, nbytes: int, stream: int) -> bool:
    """Copy between addresses; False in a thread that has never used CUDA, as torch's copy can."""
    try:
        copy(target, source, nbytes, stream)
    except BackendError as error:
        if error.code != "CUDA_ERROR_INVALID_CONTEXT":
            raise
        return False
    return True
