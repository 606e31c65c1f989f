"""The messages about tickets; :mod:`asyncvmm._core.wire` holds the others and the rules for all."""

from __future__ import annotations

import msgspec

from asyncvmm._ticket import Natural, Proof, Text


class Redeem(msgspec.Struct, array_like=True, frozen=True, tag=13, gc=False):
    """Consumer: deliver the owner of this ticket to me."""

    slot: Natural
    generation: Natural
    proof: Proof


class Waive(msgspec.Struct, array_like=True, frozen=True, tag=14, gc=False):
    """Consumer: these ranks, as far as they have not redeemed this ticket, never will."""

    slot: Natural
    generation: Natural
    proof: Proof
    first: Natural = 0
    count: Natural = 0
    """0 is the sender alone, whatever it is called."""


class PutBack(msgspec.Struct, array_like=True, frozen=True, tag=15, gc=False):
    """Consumer: I redeemed this owner and read nothing; it is as if I had not."""

    slot: Natural
    generation: Natural


class Denied(msgspec.Struct, array_like=True, frozen=True, tag=16, gc=False):
    """Exporter: this ticket is not redeemed, for a reason that is one of a few words."""

    slot: Natural
    generation: Natural
    reason: Text
