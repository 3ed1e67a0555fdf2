"""What two descriptions of a robot may say differently of the same numbers of an action."""

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError


def check_conventions(environment: Embodiment, policy: Embodiment) -> None:
    """Check that an environment reads actions as a policy was made to write them.

    Args:
        environment: The robot as the environment has it.
        policy: The robot as the policy was trained for it. What it leaves open is not compared.

    Raises:
        ConfigError: axes, anchor or rate differ.
    """
    frame, wanted_frame = environment.action_frame, policy.action_frame
    if None not in (frame, wanted_frame) and frame != wanted_frame:
        raise ConfigError(
            f"the environment reads actions in the frame {frame!r}, the policy was made for "
            f"{wanted_frame!r}: set action.frame of the workcell to {wanted_frame!r}, "
            f"or describe the policy's robot with action_frame={frame!r}"
        )
    anchor, wanted_anchor = environment.action_anchor, policy.action_anchor
    if None not in (anchor, wanted_anchor) and anchor != wanted_anchor:
        raise ConfigError(
            f"the environment measures actions from the anchor {anchor!r}, the policy was made for "
            f"{wanted_anchor!r}, and its steps would have another size: set action.anchor of the "
            f"workcell to {wanted_anchor!r}, leave it out there, or write "
            f"gym.make(..., action_anchor={wanted_anchor!r})"
        )
    rate, wanted_rate = environment.timing.control_hz, policy.timing.control_hz
    if rate != wanted_rate:
        raise ConfigError(
            f"the environment takes {rate:g} actions per second, the policy was made for "
            f"{wanted_rate:g}: set control_hz of the workcell to {wanted_rate:g}, or describe the "
            "policy's robot with that rate"
        )
