"""The driver's calls for memory: reserve, create, map, share; each once, as in ``driver``."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias

from asyncvmm._backends.driver import OUT_OF_MEMORY, call, load
from asyncvmm._errors import BackendError, PoolMemoryError

HandleType: TypeAlias = Literal["fabric", "posix"]

FABRIC_HANDLE_BYTES = 64
"""Size of ``CUmemFabricHandle``, fixed by the driver's header."""


def allocation_properties(number: int, handle_type: HandleType) -> Any:
    """Return the properties of physical memory on that GPU that can be shared so."""
    cuda = load()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = number
    properties.requestedHandleTypes = _handle_type(handle_type)
    return properties


def _handle_type(name: HandleType) -> Any:
    kinds = load().CUmemAllocationHandleType
    if name == "fabric":
        return kinds.CU_MEM_HANDLE_TYPE_FABRIC
    return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity(properties: Any) -> int:
    """Return what sizes and offsets of such memory must be multiples of, in bytes."""
    flags = load().CUmemAllocationGranularity_flags
    recommended = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(call("cuMemGetAllocationGranularity", properties, recommended))


def memory_free() -> int:
    """Return the free bytes of the current context's GPU."""
    return int(call("cuMemGetInfo"))


class Allocation:
    """One reference to a piece of physical memory, given back exactly once.

    The memory lives on while anything maps it, here or in another process, so the reference goes
    right after mapping: one that is kept keeps the memory for ever (field report 3).
    """

    __slots__ = ("_handle", "_held")

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._held = True

    @classmethod
    def create(cls, nbytes: int, properties: Any) -> Self:
        """Make new memory of ``nbytes``, a multiple of its granularity."""
        return cls(call("cuMemCreate", nbytes, properties, 0))

    @classmethod
    def retain(cls, address: int) -> Self:
        """Take one more reference to the memory that is mapped at ``address``."""
        return cls(call("cuMemRetainAllocationHandle", address))

    @classmethod
    def take_in(cls, handle: int | bytes, handle_type: HandleType) -> Self:
        """Import another process's memory; a descriptor stays the caller's."""
        return cls(call("cuMemImportFromShareableHandle", handle, _handle_type(handle_type)))

    def map(self, address: int, nbytes: int) -> None:
        """Put the memory at ``address``; nobody may touch it before access is set."""
        call("cuMemMap", address, nbytes, 0, self._handle, 0)

    def export(self, handle_type: HandleType) -> int | bytes:
        """Return a new descriptor (POSIX), or the 64 bytes of a FABRIC handle."""
        found = call("cuMemExportToShareableHandle", self._handle, _handle_type(handle_type), 0)
        return bytes(found.data) if handle_type == "fabric" else int(found)

    def release(self) -> None:
        """Give the reference back; again is a no-op."""
        if self._held:
            call("cuMemRelease", self._handle)
            self._held = False


def address_reserve(nbytes: int) -> int:
    """Return the start of a new address range with nothing behind it."""
    return int(call("cuMemAddressReserve", nbytes, 0, 0, 0))


def address_free(address: int, nbytes: int) -> None:
    """Give a reserved range back; nothing may be mapped in it."""
    call("cuMemAddressFree", address, nbytes)


def memory_unmap(address: int, nbytes: int) -> None:
    """Undo one map, of exactly its size; does not wait for kernels that read there."""
    call("cuMemUnmap", address, nbytes)


def memory_set_access(address: int, nbytes: int, number: int, *, writable: bool) -> None:
    """Let that GPU of this process read, and where ``writable`` write, a mapped range."""
    cuda = load()
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = number
    flags = cuda.CUmemAccess_flags
    access.flags = (
        flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if writable
        else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    )
    call("cuMemSetAccess", address, nbytes, [access], 1)


def memory_fill(address: int, value: int, nbytes: int, stream: Any) -> None:
    """Queue the filling of a range with one byte value."""
    call("cuMemsetD8Async", address, value, nbytes, stream)


def lacking(size: int, where: str, error: BackendError) -> BackendError:
    """Say how much memory there is, if a lack of it is the cause and the driver will tell."""
    if error.code != OUT_OF_MEMORY:
        return error
    try:
        found = PoolMemoryError(size, memory_free(), where)
    except BackendError as second:
        error.add_note(f"how much is free could not be asked: {second}")
        return error
    found.call, found.code = error.call, error.code
    return found
