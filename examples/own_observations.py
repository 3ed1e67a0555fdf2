"""Call a policy with your own observations, without an environment or simulator.

    python examples/own_observations.py

Start from here if an existing program reads your cameras and robot. The policy's embodiment defines
the observation; a wrong size, a wrong type or a missing key is an error that names it.
"""

from typing import Any

import numpy as np

from dzrobot import DreamZeroPolicy, Embodiment, default_checkpoint

STEPS = 10


def main() -> None:
    """Print the expected observation, and the actions for random images."""
    policy = DreamZeroPolicy.from_pretrained(default_checkpoint())
    robot = policy.embodiment
    for view in robot.views:
        print(f"{view.key}: image (height, width, 3) uint8, {view.resolution} in training")
    for part in robot.state:
        print(f"{part.key}: {part.dim} numbers, float32")
    print(f"{robot.language}: text")

    random = np.random.default_rng(0)
    policy.reset("mine")  # Whenever an episode begins; what is remembered belongs to the session.
    for step in range(STEPS):
        action = policy.act(observe(robot, random), session="mine")
        print(f"step {step}: {np.array2string(action, precision=2, suppress_small=True)}")


def observe(robot: Embodiment, random: np.random.Generator) -> dict[str, Any]:
    """Return one observation; read your cameras and joints here."""
    images = {
        view.key: random.integers(0, 256, (*view.resolution, 3), dtype=np.uint8)
        for view in robot.views
    }
    state = {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
    return {**images, **state, robot.language: "lift the cube"}


if __name__ == "__main__":
    main()
