"""A scripted expert that takes over from a policy in simulation, as late and imperfect as people.

What is recorded so has the same marks as a person's help, and is studied without one.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import ConfigError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action
from dzrobot.rng import seed_sequence
from dzrobot.rollout.episode import Actor, PolicyActor
from dzrobot.rollout.predictions import PredictionError

Rule = Literal["stuck", "random", "prediction"]

STUCK_M = 0.005
"""Meters within which the hand of a policy that is stuck stays."""

_AMOUNTS: Mapping[Rule, float] = {"stuck": 2.0, "random": 0.2}
"""Seconds without motion; chance in a second. An error in latents has no usual value: it depends on
the checkpoint."""

_LONGEST_S = 3600.0
_WORD = re.compile(r"([a-z]+)(?:=([0-9.]+))?")


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """When an expert takes over from a policy, how late, how well, and for how long."""

    rule: Rule
    """``stuck``: the hand has stayed within 5 mm for ``amount`` seconds; ``random``: with the
    chance ``amount`` in every second; ``prediction``: the last frame that was seen of what a plan
    predicted is farther off than ``amount``
    (:func:`~dzrobot.rollout.predictions.latent_errors`)."""

    amount: float
    delay: float = 0.5
    """Seconds until the expert reacts."""

    lasts: float | None = None
    """Seconds until they let go; None: they stay until the episode ends."""

    noise: float = 0.0
    """Standard deviation of what is added to the first six numbers of their actions."""

    @classmethod
    def parsed(cls, text: str) -> "Takeover":
        """Return what ``expert:RULE[=AMOUNT][,delay=S][,lasts=S][,noise=STD]`` says.

        Raises:
            ConfigError: It says something else.
        """
        who, _, rest = text.partition(":")
        rule, *settings = (_WORD.fullmatch(word) for word in rest.split(","))
        known = ("delay", "lasts", "noise")
        names = [None if one is None else one[1] for one in settings]
        kind = next((one for one in get_args(Rule) if rule is not None and one == rule[1]), None)
        if who != "expert" or rule is None or kind is None:
            raise _refused(text)
        if not set(names) <= {*known} or len(set(names)) < len(names):
            raise _refused(text)
        values = {one[1]: _number(one[2] or "", text) for one in settings if one is not None}
        amount = _AMOUNTS.get(kind) if rule[2] is None else _number(rule[2], text)
        if amount is None or (kind == "random" and not 0 < amount <= 1):
            raise _refused(text)
        return cls(rule=kind, amount=amount, **values)


def _number(written: str, text: str) -> float:
    try:
        value = float(written)
    except ValueError:
        raise _refused(text) from None
    if not 0 <= value <= _LONGEST_S:
        raise _refused(text)
    return value


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"--takeover {text}: write expert:stuck=2 (seconds without motion), expert:random=0.2 "
        "(chance in a second, at most 1) or expert:prediction=0.1 (error of the predicted video in "
        "latents, as `dzrobot compare --predictions` prints it), and if you like ,delay=0.5 "
        ",lasts=3 ,noise=0.1 behind it"
    )


class HelpedPolicy(Actor):
    """A policy that something else takes over from; see :attr:`intervened`."""

    intervened = False
    """Whether the newest action is not the policy's."""


class ExpertHelp(HelpedPolicy):
    """A policy and an expert of the simulator, as an actor.

    Args:
        policy: Acts; it begins anew where the expert lets go. With the rule ``prediction`` it
            predicts, and encodes images.
        expert: Makes the expert for an environment that was reset.
        takeover: When the expert acts.
        hand: Returns where the hand is in an observation, (3,) in meters.
        hz: Actions per second.
    """

    def __init__(
        self, policy: PolicyActor, expert: Callable[[Any], Actor], takeover: Takeover,
        hand: Callable[[Observation], NDArray[np.float32]], hz: float,
    ) -> None:  # fmt: skip
        self._policy, self._make = policy, expert
        self._takeover, self._hand, self._hz = takeover, hand, hz
        self._rows = {
            name: round(seconds * hz)
            for name, seconds in (("stuck", takeover.amount), ("delay", takeover.delay))
        }
        self._left: int | None = None
        """Rows until the expert lets go; None: they do not."""

        self._lasts = None if takeover.lasts is None else max(1, round(takeover.lasts * hz))

    def begin(self, env: Any) -> None:
        """Start a new episode; the policy acts first."""
        self._env, self.intervened = env, False
        # Keyed by the start, so that a recording which goes on later draws the same.
        seed = max(0, int(env.unwrapped.np_random_seed))
        self._draws = np.random.default_rng(seed_sequence("takeover", seed))
        self._expert = self._make(env)
        self._policy.begin(env)
        self._watch()

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the expert's action once they have taken over, the policy's before and after."""
        if self.intervened and self._left == 0:
            self.intervened = False
            self._policy.begin(self._env)
            self._watch()
        if not self.intervened and self._due(observation):
            self.intervened, self._left = True, self._lasts
            self._expert.begin(self._env)
        if not self.intervened:
            acted = self._policy.act(observation)
            if self._errors is not None:
                self._error = self._errors.see(observation) or 0.0
            return acted
        self._left = None if self._left is None else self._left - 1
        action, spent = self._expert.act(observation)
        noisy = np.array(action, np.float32)
        noisy[:6] += self._draws.normal(0, self._takeover.noise, noisy[:6].shape)
        return noisy, spent

    def _watch(self) -> None:
        """Begin to look for a reason to take over."""
        self._seen: deque[NDArray[np.float32]] = deque(maxlen=self._rows["stuck"] + 1)
        self._waits: int | None = None
        by_error = self._takeover.rule == "prediction"
        self._errors = PredictionError(self._policy) if by_error else None
        self._error = 0.0

    def _due(self, observation: Observation) -> bool:
        """Return whether the reason is there, and the time to react is over."""
        if self._waits is None and self._needed(observation):
            self._waits = self._rows["delay"]
        if self._waits is None:
            return False
        self._waits -= 1
        return self._waits < 0

    def _needed(self, observation: Observation) -> bool:
        if self._takeover.rule == "random":
            return bool(self._draws.random() < self._takeover.amount / self._hz)
        if self._takeover.rule == "prediction":
            return self._error > self._takeover.amount
        self._seen.append(self._hand(observation))
        whole = len(self._seen) == self._seen.maxlen
        return whole and float(np.ptp(np.stack(self._seen), axis=0).max()) <= STUCK_M
