"""How the hand follows one action, in simulation and through the drivers of the emulated arm.

``python benchmarks/franka_response.py`` prints, for one half of the largest step along y, which
share of it has been gone after each of the next steps, and how old images are as they are observed.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import dzrobot  # noqa: F401 (registers the environments)
from dzrobot.envs.franka.make import make_franka

Array = NDArray[np.float64]

_STEPS = 10
_SETTLED = 5
_SHARE = 0.5
_LATE = {"frame_age_s": 5.0, "state_age_s": 2.0, "hold_after_s": 2.0}


def main() -> None:
    """Print a line for simulation, one for the arm, and the age of its images."""
    lift = gym.make("dzrobot/lift-v0", cameras=False).unwrapped
    lift.reset(seed=0)
    simulation = lift.simulation.env  # type: ignore[attr-defined]
    gone = followed(lift, lambda: np.array(simulation._eef_xpos), 0.0)
    _tell("dzrobot/lift-v0", lift.control_hz, gone)  # type: ignore[attr-defined]
    lift.close()
    arm = make_franka(workcell="emulated", limits=_LATE, action={"frame": "base"})
    arm.reset(seed=0)
    ages: list[float] = []

    def place() -> Array:
        ages.extend(arm._sensors.read().frame_ages_s.values())
        return arm.arm.state().pose[:3, 3]

    gone = followed(arm, place, 1.0)
    _tell("Franka-PnP-v0, emulated", arm.control_hz, gone)
    print(
        f"its images are {1e3 * np.median(ages):.0f} ms old (median), {1e3 * max(ages):.0f} at most"
    )
    arm.close()


def followed(env: gym.Env[Any, Any], place: Callable[[], Array], gripper: float) -> Array:
    """Return which share (steps,) of its way the hand has gone after each step."""
    action = np.zeros(7, np.float32)
    action[6] = gripper
    for _ in range(_SETTLED):
        env.step(action)
    places = [place()]
    for step in range(_STEPS):
        action[1] = _SHARE if step == 0 else 0.0
        env.step(action)
        places.append(place())
    way = np.array(places)[:, 1] - places[0][1]
    shares: Array = way[1:] / way[-1]
    return shares


def _tell(name: str, hz: float, gone: Array) -> None:
    shares = ", ".join(
        f"{1e3 * (step + 1) / hz:.0f} ms {100 * share:.0f} %" for step, share in enumerate(gone[:6])
    )
    print(f"{name} at {hz:g} Hz: {shares}")


if __name__ == "__main__":
    main()
