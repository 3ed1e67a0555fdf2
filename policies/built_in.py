"""Policies that need no checkpoint: hold still, move at random, ask the scripted expert."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import check_holds, hold_command
from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.window import Observation
from dzrobot.policies.base import DEFAULT_SESSION, Policy, When
from dzrobot.rng import numpy_generator


class ExpertPolicy(Policy):
    """The scripted expert, which looks into its environment and never at an observation.

    Args:
        expert: Made beside the environment; has ``act`` and ``reset``.
    """

    def __init__(self, expert: Any) -> None:
        self._expert = expert

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return the expert's next action, (A,)."""
        action: NDArray[np.float32] = self._expert.act(obs)
        return action

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return False."""
        return False

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode."""
        self._expert.reset()


class HoldPolicy(Policy):
    """Leaves a robot as it is.

    Args:
        robot: Every part of its action says how; see ``Part.hold``.

    Raises:
        ConfigError: a part does not.
    """

    def __init__(self, robot: Embodiment) -> None:
        check_holds(robot, "by the policy 'hold'")
        self._robot = robot
        self._held: dict[str, NDArray[np.float32]] = {}

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return zeros, or where an absolute part was at first, (A,)."""
        held = hold_command(self._robot, obs, self._held.get(session))
        self._held[session] = held
        return held.copy()

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return False."""
        return False

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode, which is held where it begins."""
        self._held.pop(session, None)

    def end_all(self) -> None:
        """Forget where all sessions are held."""
        self._held.clear()


class RandomPolicy(Policy):
    """Uniform numbers in [-1, 1], a function of seed and episode."""

    def __init__(self, action_dim: int, seed: int) -> None:
        self._action_dim = action_dim
        self._seed = seed
        self._draws: dict[str, np.random.Generator] = {}
        self._numbers: dict[str, int] = {}

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> NDArray[np.float32]:
        """Return the next numbers (A,) of the session."""
        if session not in self._draws:
            self.reset(session)
        return self._draws[session].uniform(-1, 1, self._action_dim).astype(np.float32)

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return False."""
        return False

    def end_all(self) -> None:
        """Forget the numbers of all sessions."""
        self._draws.clear()
        self._numbers.clear()

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start the numbers of ``episode``; None: of the one after the last, from 0 on."""
        number = self._numbers.get(session, -1) + 1 if episode is None else episode
        self._numbers[session] = number
        self._draws[session] = numpy_generator("random policy", self._seed, number)
