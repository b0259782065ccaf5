"""Outputs on their way from the engine's thread into the event loop."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable
from typing import Any, cast

from headrace.engine.request import Output
from headrace.server.generation import IN_A_ROW, Mailbox
from tests.waiting import WAIT

OUTPUT = Output("", ())


class CarelessMailbox(Mailbox):
    """Looks whether somebody has been woken before it puts its item down, not after."""

    def post(self, index: int, output: Output) -> None:
        woken = self._woken
        self._posted.append((index, output))
        if not woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)


class Interleaved(collections.deque[Any]):
    """Runs `between` just before an item is added: what another thread could do there."""

    between: Callable[[], None] | None = None

    def append(self, item: Any) -> None:
        if self.between is not None:
            self.between()
        super().append(item)


class RecordedLoop:
    """Keeps what it was asked to call, until it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


async def deliver_between(kind: type[Mailbox]) -> int:
    """How many of two posts arrive if the loop delivers the first one in the middle of the second post."""
    mailbox, loop = kind(), RecordedLoop()
    mailbox._posted = posted = Interleaved()
    mailbox._loop = cast(Any, loop)
    mailbox.post(0, OUTPUT)
    posted.between = loop.run
    mailbox.post(1, OUTPUT)
    loop.run()
    return mailbox._arrived.qsize()


def test_a_post_during_a_delivery_wakes_the_loop() -> None:
    assert asyncio.run(deliver_between(Mailbox)) == 2


def test_the_test_above_sees_a_lost_wake_up() -> None:
    assert asyncio.run(deliver_between(CarelessMailbox)) == 1


def test_no_output_is_lost_between_threads() -> None:
    count = 5000

    async def receive() -> list[int]:
        mailbox = Mailbox()

        def post() -> None:
            for index in range(count):
                mailbox.post(index, OUTPUT)

        thread = threading.Thread(target=post)
        thread.start()
        received = [(await asyncio.wait_for(mailbox.next(), WAIT))[0] for _ in range(count)]
        thread.join()
        return received

    assert asyncio.run(receive()) == list(range(count))


def test_many_outputs_that_lie_there_leave_the_event_loop_to_others() -> None:
    """What a client that reads slowly has let gather can be taken without waiting for anything."""

    async def between(count: int) -> int:
        mailbox, others = Mailbox(), 0
        for index in range(count):
            mailbox.post(index, OUTPUT)
        await asyncio.sleep(0)  # they are delivered

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert [(await mailbox.next())[0] for _ in range(count)] == list(range(count))
        task.cancel()
        return others

    assert asyncio.run(between(IN_A_ROW)) == 0
    assert asyncio.run(between(100 * IN_A_ROW)) >= 99


def test_a_closed_loop_is_no_error_for_the_engine() -> None:
    async def make() -> Mailbox:
        return Mailbox()

    asyncio.run(make()).post(0, OUTPUT)
