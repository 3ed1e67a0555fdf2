"""The first calls, which compile and allocate, and the room that they leave for sessions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import RECENT, PlanningPolicy
from dzrobot.policies.serving.endpoint import ServeOptions

MOST_SESSIONS = 256
"""Where memory would allow more."""

_SHARE = 0.8
"""Of free memory that sessions may take: calls need some too."""

_SESSION = "warm-up"

_PLACES = 8
"""Of a window that are tried at most; published ones have five or fewer."""


@dataclass(frozen=True, kw_only=True)
class SessionCapacity:
    """How many sessions are taken, and why."""

    sessions: int
    session_bytes: int
    free_bytes: int

    @property
    def text(self) -> str:
        """Return it for people."""
        megabytes = 1024**2
        return (
            f"room for {self.sessions} sessions of {self.session_bytes / megabytes:.1f} MiB; "
            f"{self.free_bytes / megabytes:.0f} MiB are free"
        )


def warm_up(policy: PlanningPolicy, options: ServeOptions) -> SessionCapacity:
    """Plan in every place of the memory's window, and return how many sessions fit.

    Raises:
        ConfigError: fewer sessions fit than are asked for, or none.
    """
    found = [policy.footprint(_SESSION) for _ in walk_window(policy, _SESSION)]
    measured = max(reversed(found), key=lambda footprint: footprint.session)
    policy.evict(_SESSION)
    # A call of several sessions works on copies of what they remember.
    copies = measured.session * options.max_batch if options.max_batch > 1 else 0
    left = _SHARE * (measured.free + measured.session) - copies
    fitting = int(left // measured.session) if measured.session else MOST_SESSIONS
    wanted = options.max_sessions
    if fitting < (wanted or 1):
        raise ConfigError(
            f"{wanted or 1} sessions of {measured.session} bytes do not fit: "
            f"{measured.free} bytes are free, which is room for {max(0, fitting)}; lower "
            "--max-sessions or --max-batch, or choose a smaller network"
        )
    return SessionCapacity(
        sessions=wanted or min(fitting, MOST_SESSIONS),
        session_bytes=measured.session,
        free_bytes=measured.free,
    )


def walk_window(policy: PlanningPolicy, session: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Plan once in every place of the memory's window; yield (latent frame it begins at, plan).

    Places differ in shape. The window begins anew when it is full; without memory there is one.
    What is seen is black.

    Args:
        policy: What plans; the session is left open.
        session: Begun anew.
    """
    policy.reset(session)
    yield 0, policy.infer_batch([blank(policy.embodiment, None)], [session])[0]
    if policy.history == "off":
        return
    later, place = blank(policy.embodiment, RECENT), -1
    for _ in range(_PLACES):
        if policy.stage(session) <= place:
            return
        place = policy.stage(session)
        yield place, policy.infer_batch([later], [session])[0]


def blank(robot: Embodiment, frames: int | None) -> Observation:
    """Return a black observation; with ``frames``, stacks of so many."""
    stack = () if frames is None else (frames,)
    views: dict[str, Any] = {
        view.key: np.zeros((*stack, *view.resolution, 3), np.uint8) for view in robot.views
    }
    parts = {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
    return {**views, **parts, robot.language: "warm up"}
