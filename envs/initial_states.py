"""Which of a task's initial states an episode begins from."""

from collections.abc import Mapping
from typing import Any

from dzrobot.errors import ModalityError

DRAWN = 2**31
"""How many there are where a start's number is all that it is drawn from."""


class InitialStates:
    """A cursor over ``count`` initial states.

    A seed names a state (``seed % count``), so that ``reset(seed=s)`` repeats itself and fixes
    every unseeded reset after it. ``options={"init_state_id": k}`` names one. Otherwise the next
    one follows, from 0 onwards.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._last = -1

    def choose(self, seed: int | None, options: Mapping[str, Any] | None) -> int:
        """Return the initial state of the next episode, in ``[0, count)``.

        Raises:
            ModalityError: ``options`` holds another name, or a state that does not exist.
        """
        options = options or {}
        if unknown := sorted(set(options) - {"init_state_id"}):
            raise ModalityError(
                f"reset got the options {', '.join(unknown)}; the only one is init_state_id."
            )
        if "init_state_id" in options:
            self._last = self._checked(options["init_state_id"])
        elif seed is not None:
            self._last = seed % self._count
        else:
            self._last = (self._last + 1) % self._count
        return self._last

    def _checked(self, wanted: Any) -> int:
        try:
            index = range(self._count).index(wanted)
        except ValueError as error:
            raise ModalityError(
                f"init_state_id={wanted!r} does not exist; this task has 0 to {self._count - 1}."
            ) from error
        return index
