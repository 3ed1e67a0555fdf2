"""The process of one driver: ``python -m dzrobot.envs.processes.driver_main SOCKET [MEMORY SIZE]``.

It answers questions one after another, and in between lets the driver do what is due. When its
parent is gone, however it went, it closes the device and ends.
"""

import faulthandler
import os
import pickle
import socket
import sys
import time
from typing import Any, Protocol

from dzrobot.envs.processes.driver_process import NO_ANSWER, Latest
from dzrobot.errors import DzrobotError, RobotError

_HUNG_S = 30.0
"""A native call that lasts longer ends the process: nobody may be left to kill it."""

_WATCHED_S = 1.0
_BIGGEST = 1 << 20


class Driver(Protocol):
    """What runs in the process; its public methods are what the parent may ask."""

    def tick(self) -> float:
        """Do what is due and return the seconds until the next is."""
        ...

    def translate(self, error: Exception) -> DzrobotError:
        """Return an error of the library as one of this package."""
        ...

    def close(self) -> None:
        """Bring the device to rest and let it go."""
        ...


def serve(connection: socket.socket, latest: Latest | None) -> None:
    """Run the driver that the first message names, until the parent is gone."""
    make, arguments = pickle.loads(connection.recv(_BIGGEST))
    given = arguments if latest is None else (*arguments, latest)
    driver: Driver = make(*given)
    watched_s = -_WATCHED_S
    try:
        while True:
            if time.monotonic() - watched_s > _WATCHED_S:
                watched_s = time.monotonic()
                # This timer needs no lock of Python's, which a hung call may hold. It is a thread,
                # so it is not set again for every question.
                faulthandler.dump_traceback_later(_HUNG_S, exit=True)
            # Zero would make the socket answer at once, with another error.
            connection.settimeout(max(1e-4, driver.tick()))
            try:
                data = connection.recv(_BIGGEST)
            except TimeoutError:
                continue
            if not data:
                return
            number, method, words = pickle.loads(data)
            connection.settimeout(_HUNG_S)
            answer = _answer(driver, method, words)
            if number != NO_ANSWER:
                connection.send(pickle.dumps((number, answer)))
    except OSError:
        # The parent went away between a question and its answer.
        return
    finally:
        driver.close()


def _answer(driver: Driver, method: str, words: tuple[Any, ...]) -> Any:
    try:
        return getattr(driver, method)(*words)
    except DzrobotError as error:
        found = error
    except Exception as error:  # noqa: BLE001 (whatever a library raises is the parent's to read)
        found = driver.translate(error)
    # Frames hold the driver's objects, and causes need not be picklable.
    found.__traceback__ = found.__cause__ = found.__context__ = None
    return found


def plainly(error: Exception) -> RobotError:
    """Return an unexpected error of a library as one of this package."""
    return RobotError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    serve(
        socket.socket(fileno=numbers[0]),
        Latest(numbers[1], numbers[2]) if len(numbers) > 1 else None,
    )
    # Destructors of native libraries may wait for threads that never end.
    os._exit(0)
