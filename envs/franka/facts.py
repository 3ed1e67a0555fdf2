"""What an episode says of the arm besides its result: kept beside every record."""

import copy
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.panda.state import ArmState

_log = logging.getLogger(__name__)

SETTLES_S = 0.5
"""The arm tells the share of its last hundred commands; so long after control began, all of them
are ours."""


_KEPT = ("abort", "abort_message", "recoveries", "late_steps", "paused_s", "is_grasped")
"""What of the last info of an episode is kept."""


class ArmEpisodeFacts:
    """Counts what happens in one episode, and warns of a poor connection once.

    Args:
        config: The workcell.
        lasting: What is true of all its episodes; see :func:`lasting_facts`.
    """

    def __init__(self, config: FrankaConfig, lasting: Mapping[str, Any]) -> None:
        self._least = config.controller.least_success_rate
        self._lasting = dict(lasting)
        self._limited: Counter[str] = Counter()
        self._lowest: float | None = None
        self._controlled_since_s: float | None = None
        self._recoveries = 0
        self._warned = False

    def note(self, state: ArmState, limited_by: tuple[str, ...], recoveries: int) -> None:
        """Take a step's state, and what its action was limited by."""
        self._limited.update(limited_by)
        if recoveries != self._recoveries or not state.controlled:
            self._recoveries = recoveries
            self.restart()
        if not state.controlled:
            return
        if self._controlled_since_s is None:
            self._controlled_since_s = state.robot_time_s
        if state.robot_time_s - self._controlled_since_s < SETTLES_S:
            return
        rate = state.success_rate
        self._lowest = rate if self._lowest is None else min(self._lowest, rate)
        if rate < self._least and not self._warned:
            self._warned = True
            _log.warning(
                "only %.0f %% of the control commands reach the arm; below %.0f %% it moves badly "
                "and may stop by itself: use a real-time kernel, a network port of its own, and "
                "end other programs (`dzrobot doctor franka` looks at all of it)",
                100 * rate, 100 * self._least,
            )  # fmt: skip

    def restart(self) -> None:
        """Control starts over: the arm's count of commands does too."""
        self._controlled_since_s = None

    def plain(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts as plain values, some of them from the newest ``info``."""
        return {
            **{name: info[name] for name in _KEPT},
            "success_rate": self._lowest,
            "limited": dict(sorted(self._limited.items())),
            # Whoever gets an info may keep and change it.
            **copy.deepcopy(self._lasting),
        }


def lasting_facts(
    config: FrankaConfig, workcell: Mapping[str, Any], libraries: tuple[str, ...]
) -> dict[str, Any]:
    """Return what is true of every episode in a workcell, as plain values.

    Args:
        config: The workcell.
        workcell: The same, without what says where its devices are.
        libraries: Distributions of the drivers.
    """
    return {
        **{f"action.{name}": value for name, value in config.action},
        "workcell": workcell_digest(workcell),
        "firmware": config.firmware,
        "drivers": dict(_versions_of(libraries)),
    }


def workcell_digest(workcell: Mapping[str, Any]) -> str:
    """Return eight letters that tell workcells apart; addresses and serial numbers do not count."""
    return hashlib.sha256(json.dumps(workcell, sort_keys=True).encode()).hexdigest()[:8]


@cache
def _versions_of(libraries: tuple[str, ...]) -> Mapping[str, str]:
    """Return the version of every library that is installed."""
    found = {}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
