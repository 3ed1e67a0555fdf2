"""A server in a thread, for notebooks, tests and measurements."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dzrobot.policies.serving.server import PolicyServer


@contextmanager
def in_background(server: PolicyServer) -> Iterator[PolicyServer]:
    """Yield ``server`` once it lets clients in; drain and end it afterwards.

    Raises:
        ConfigError: it cannot be started.
    """
    started = threading.Event()
    failures: list[BaseException] = []
    handle: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def live() -> None:
        stop = asyncio.Event()
        handle.append((asyncio.get_running_loop(), stop))
        await server.run(stop, ready=started.set)

    def run() -> None:
        work = live()
        loop = asyncio.new_event_loop()
        task = loop.create_task(work)
        loop.run_until_complete(asyncio.wait([task]))
        if error := task.exception():
            failures.append(error)
        loop.close()
        started.set()

    thread = threading.Thread(target=run, name="policy server", daemon=True)
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield server
    finally:
        if not failures and thread.is_alive():
            loop, stop = handle[0]
            loop.call_soon_threadsafe(stop.set)
        thread.join()
