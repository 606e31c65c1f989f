"""Who still owes an acknowledgement, for transports that bring their own messages."""

from __future__ import annotations

import asyncio


class Acks:
    """Counts acknowledgements by number and wakes who waits for the last one."""

    def __init__(self) -> None:
        self._owed: dict[int, int] = {}
        self._waiters: dict[int, asyncio.Future[None]] = {}

    def expect(self, number: int, count: int) -> None:
        """Note that ``count`` consumers are to acknowledge it."""
        self._owed[number] = count

    def heard(self, number: int) -> None:
        """One consumer is done with it."""
        left = self._owed[number] - 1
        if left:
            self._owed[number] = left
            return
        del self._owed[number]
        waiter = self._waiters.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def settled(self, number: int) -> bool:
        """Say whether nobody owes anything for it."""
        return number not in self._owed

    async def wait(self, number: int) -> None:
        """Wait on the running loop until it is settled."""
        if number in self._owed:
            waiter = self._waiters[number] = asyncio.get_running_loop().create_future()
            await waiter
