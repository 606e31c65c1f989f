"""Learning that an owner's memory is back, for code that is not async."""

from __future__ import annotations

from asyncvmm._exporter.acknowledgement import Acknowledgement as AsyncAcknowledgement
from asyncvmm._types import Key, Outcome
from asyncvmm.blocking._facade import Facade


class Acknowledgement:
    """Ask it whether an owner's memory is back in the pool, or wait for that.

    It means what :class:`asyncvmm.Acknowledgement` means; looking makes no system call.
    """

    def __init__(self, exporter: Facade, acknowledgement: AsyncAcknowledgement) -> None:
        self._exporter = exporter
        self._acknowledgement = acknowledgement

    @property
    def key(self) -> Key:
        """The owner's name."""
        return self._acknowledgement.key

    @property
    def outcome(self) -> Outcome | None:
        """Who let go, and how; None while somebody has not."""
        return self._acknowledgement.outcome

    def done(self) -> bool:
        """Say whether the owner's memory is back."""
        return self._acknowledgement.done()

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait until it is done and return who let go, and how.

        Raises DeliveryError if fewer consumers released the owner than the send required,
        ClosedError if the exporter closed before, TimeoutError after ``timeout`` seconds.
        """
        if not self._acknowledgement.done():

            async def wait() -> Outcome:
                return await self._acknowledgement

            return self._exporter._run(
                wait, timeout, f"owner {self.key!r} to be let go of; statistics() says by whom"
            )
        return self._acknowledgement.result()

    def __repr__(self) -> str:
        return f"<blocking.{repr(self._acknowledgement)[1:]}"
