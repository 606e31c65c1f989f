"""The transports, by the names under which results are compared over time."""

from __future__ import annotations

import importlib

from benchmarks.transports.base import Transport

MODULES = {
    "asyncvmm": "ours:Send",
    "asyncvmm_send_all": "ours:SendAll",
    "asyncvmm_reserve": "ours:Reserve",
    "asyncvmm_reserve_filled": "ours:ReserveFilled",
    "torch_mp": "torch_mp:TorchMP",
    "torch_mp_reused": "torch_mp:TorchMPReused",
    "pickle_uds": "pickle_uds:PickleUDS",
    "zmq": "zeromq:ZMQ",
    "iceoryx2": "iceoryx:Iceoryx",
    "ucxx": "ucxx:UCXX",
    "nixl": "nixl:NIXL",
    "floor": "floor:Floor",
    "floor_reserve": "floor:FloorReserve",
    "floor_loop": "floor:FloorLoop",
    "floor_turning": "floor_turning:FloorTurning",
    "floor_thread": "floor:FloorThread",
    "ping_pong": "floor:PingPong",
    "plain_copy": "plain_copy:PlainCopy",
}


class UnavailableError(Exception):
    """A transport cannot be used here; the text says why."""


def load(name: str) -> type[Transport]:
    """Return a transport by its name, or by ``module:Class`` for one that is not ours.

    Raises UnavailableError if what it needs is not installed, KeyError for an unknown name.
    """
    where = f"benchmarks.transports.{MODULES[name]}" if ":" not in name else name
    module, _, attribute = where.partition(":")
    try:
        found: type[Transport] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        hint = "pip install 'asyncvmm[bench]'"
        raise UnavailableError(f"{error.name} is not installed: {hint}") from error
    except ImportError as error:
        raise UnavailableError(str(error)) from error
    if not issubclass(found, Transport):
        raise KeyError(name)
    return found
