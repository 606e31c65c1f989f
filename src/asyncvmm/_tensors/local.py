"""An owner copied into this process's own memory, found again as long as anybody has any of it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from asyncvmm._core.wire import Feature
from asyncvmm._tensors.host import split
from asyncvmm._tensors.plan import Tensor
from asyncvmm._ticket_errors import RefusedTicketError


class KeptCopy(NamedTuple):
    """A copy, and what keeps its bytes."""

    copy: LocalCopy
    storage: torch.UntypedStorage | None


class LocalCopy:
    """The features of one owner as views of one local buffer.

    It keeps none of them: the buffer lives as long as a tensor over it, a slice or an import of
    one does, and this object as long as the buffer.  A :class:`KeptCopy` keeps both.
    """

    __slots__ = ("__weakref__", "_features", "_storage", "_tensors", "_without_bytes")

    def __init__(self, tensors: Mapping[str, Tensor], features: Sequence[Feature]) -> None:
        self._features = features
        # These have no buffer that could tell when they are gone, and cost none either.
        self._without_bytes = {name: t for name, t in tensors.items() if not t.numel()}
        self._tensors = {name: weakref.ref(t) for name, t in tensors.items() if t.numel()}
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        for tensor in tensors.values():
            if tensor.numel():
                storage = tensor.untyped_storage()
                self._storage = weakref.ref(storage)
                weakref.finalize(storage, _nothing, self).atexit = False
                break

    @classmethod
    def make(cls, tensors: Mapping[str, Tensor], features: Sequence[Feature]) -> KeptCopy:
        """Take over the tensors of one buffer; the result alone keeps it for now."""
        kept = cls(tensors, features).keep()
        assert kept is not None, "the tensors are alive until this returns"
        return kept

    def keep(self) -> KeptCopy | None:
        """Return what keeps the copy, or None if its bytes are gone."""
        if self._storage is None:
            return KeptCopy(self, None)
        storage = self._storage()
        return None if storage is None else KeptCopy(self, storage)

    def feature(self, index: int, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return one feature: the tensor that was returned before, if anybody still has it.

        Raises RefusedTicketError if the owner has another feature there than is asked for.
        """
        features = self._features
        if index >= len(features) or features[index] != Feature(name, dtype, tuple(shape)):
            raise RefusedTicketError(
                f"the ticket is for feature {index}, {name!r} of {dtype} and shape {list(shape)}, "
                f"which its owner does not have",
                reason="forged",
            )
        if name in self._without_bytes:
            return self._without_bytes[name]
        found = self._tensors[name]()
        if found is None:
            kept = self.keep()
            assert kept is not None, "whoever asks keeps it"
            storage = kept.storage
            assert storage is not None
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            found = split(whole, features)[name]
            self._tensors[name] = weakref.ref(found)
        return found


def _nothing(_: object) -> None:
    """Do nothing: a finaliser holds its arguments until it runs, and that is all it is for."""
