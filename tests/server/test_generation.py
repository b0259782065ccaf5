"""Outputs on their way from the engine's thread into the event loop."""

from __future__ import annotations

import asyncio
import threading

from headrace.engine.request import Output
from headrace.server.generation import Mailbox


def test_no_output_is_lost_or_left_lying() -> None:
    """The wake-up is shared by all that wait, and a lost one would leave the last output undelivered."""
    count = 20000

    async def receive() -> list[int]:
        mailbox = Mailbox()

        def post() -> None:
            for index in range(count):
                mailbox.post(index, Output("", ()))

        thread = threading.Thread(target=post)
        thread.start()
        received = [(await asyncio.wait_for(mailbox.next(), 10))[0] for _ in range(count)]
        thread.join()
        return received

    assert asyncio.run(receive()) == list(range(count))


def test_a_closed_loop_is_no_error_for_the_engine() -> None:
    async def make() -> Mailbox:
        return Mailbox()

    asyncio.run(make()).post(0, Output("", ()))
