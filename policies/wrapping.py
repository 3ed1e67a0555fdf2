"""A policy around another: one that forwards everything, and one that adapts a plain object."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dzrobot.documents import shorten
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, SessionError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import (
    DEFAULT_SESSION,
    Abilities,
    Action,
    Ask,
    Footprint,
    Image,
    ImaginedLatents,
    Leftover,
    Method,
    Observations,
    Plan,
    Policy,
    When,
)

_log = logging.getLogger(__name__)


class Wrapper(Policy):
    """Does all that ``policy`` does and can do, for as long as nothing is overridden.

    Override :meth:`act_batch` for what is done with the actions (:meth:`act` calls it), and
    :meth:`plan` for the plans that others execute: servers, and ``--execution``. What only the
    inner policy has, such as its ``card``, is found in :attr:`policy`.

    Args:
        policy: What is wrapped; a plain object is adapted, see :func:`adapted`.
    """

    def __init__(self, policy: Policy | Any) -> None:
        self.policy: Policy = adapted(policy)
        """What is wrapped."""

        inner = self.policy
        self.embodiment, self.execute = inner.embodiment, inner.execute
        """Robot, and rows of each plan that are executed, of the inner policy."""

        self.history, self.planning = inner.history, inner.planning
        """Frames of the past that it is to be shown, and what it has planned so far."""

    @property
    def can(self) -> Abilities:
        """Return what the inner policy can do."""
        return self.policy.can

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``."""
        self.policy.reset(session, episode=episode)

    def end_all(self) -> None:
        """End all sessions."""
        self.policy.end_all()

    def evict(self, session: str) -> None:
        """End ``session`` and free its memory."""
        self.policy.evict(session)

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the action (A,) of :meth:`act_batch` for ``obs`` of ``session``."""
        return self.act_batch([obs], [session])[0]

    def act_batch(self, observations: Observations, sessions: Sequence[str]) -> list[Action]:
        """Return one action (A,) for each of ``observations`` and ``sessions``."""
        return self.policy.act_batch(observations, sessions)

    def observe(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> None:
        """Take in ``obs``, what the robot of ``session`` sees at this step."""
        self.policy.observe(obs, session=session)

    def ask(self, *, session: str = DEFAULT_SESSION, leftover: Leftover | None = None) -> Ask:
        """Return the question for a plan of ``session`` that continues ``leftover``."""
        return self.policy.ask(session=session, leftover=leftover)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plan of each of ``asks``."""
        return self.policy.plan(asks)

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return whether the next images of ``session``, for ``when``, are looked at."""
        return self.policy.reads_frames(session=session, when=when)

    def plans_next(self, *, session: str = DEFAULT_SESSION) -> bool:
        """Return whether the next action of ``session`` takes a plan."""
        return self.policy.plans_next(session=session)

    def report(self) -> str:
        """Return what is to be said after a run."""
        return self.policy.report()

    def last_plan(self, session: str = DEFAULT_SESSION) -> Plan | None:
        """Return the plan that ``session`` executes."""
        return self.policy.last_plan(session)

    def stage(self, session: str) -> int:
        """Return where in its episode a session stands."""
        return self.policy.stage(session)

    def footprint(self, session: str) -> Footprint:
        """Return the memory that an open session takes, and what is left."""
        return self.policy.footprint(session)

    def imagine(self, session: str = DEFAULT_SESSION) -> Image:
        """Return the video (T, H, W, 3) uint8 that the last plan of ``session`` predicts."""
        return self.policy.imagine(session)

    def imagine_later(self, session: str = DEFAULT_SESSION) -> Callable[[int], Image]:
        """Return what computes :meth:`imagine` of ``session``."""
        return self.policy.imagine_later(session)

    def imagine_latents(self, session: str = DEFAULT_SESSION) -> ImaginedLatents:
        """Return the latents that the last plan of ``session`` predicts."""
        return self.policy.imagine_latents(session)

    def encode_images(self, images: Image) -> NDArray[np.float32]:
        """Return the latents (N, ...) of images (N, H, W, 3)."""
        return self.policy.encode_images(images)


def adapted(policy: Policy | Any) -> Policy:
    """Return ``policy`` as a :class:`Policy`; a plain object has to have ``act`` and ``reset``.

    Of a plain object, the optional methods that were documented before there was a base class are
    used for one more version, and what it loses of a policy that it wraps is said. It is served
    only where it says ``serves = True``.

    Raises:
        ConfigError: it has no ``act`` or ``reset``, or is a name or a class.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        raise ConfigError(
            f"{shorten(policy)} is a name, as the command line and PolicySpec(name=...) take it: "
            "give a policy, such as DreamZeroPolicy.from_pretrained(...)"
        )
    if isinstance(policy, type):
        raise ConfigError(
            f"{policy.__name__} is a class: give one of its objects, {policy.__name__}(...)"
        )
    return _Adapted(policy)


def servable(given: Policy | Any) -> Policy:
    """Return ``given`` as a policy that can be served.

    Raises:
        ConfigError: it cannot be; names what it lacks.
    """
    policy = adapted(given)
    if not policy.can.serves:
        raise ConfigError(
            f"a policy of the class {type(given).__name__} cannot be served, because it lacks "
            f"{' and '.join(_lacks_to_serve(given))}: only what makes whole plans can, a subclass "
            "of dzrobot.Policy that overrides plan and sets embodiment (or a plain object with "
            "serves = True, and with infer_batch, evict, stage and footprint)"
        )
    return policy


def _lacks_to_serve(given: Policy | Any) -> list[str]:
    """Return what a policy that cannot be served would need in order to be.

    Args:
        given: As its author wrote it; a plain object is not adapted.
    """
    found = {name: getattr(given, name, None) for name in (*_SERVING, "serves", "embodiment")}
    if isinstance(given, Policy):
        missing = ["plan"]
    else:
        missing = [] if found["serves"] is True else ["serves = True"]
        missing += [name for name in _SERVING if not callable(found[name])]
    return [*missing, *([] if isinstance(found["embodiment"], Embodiment) else ["embodiment"])]


_ACTING = ("act", "reset", "end_all")
_SERVING = ("infer_batch", "evict", "stage", "footprint")
_OPTIONAL = (
    "act_batch", "reads_frames", "last_plan", "imagine", "imagine_later", "observe", "request",
    "result", "longest_delay", "plan_batch",
)  # fmt: skip
_SAME = {"act_batch", "last_plan", "imagine", "imagine_later", *_SERVING} - {"infer_batch"}
"""Mean what they mean in the base class, so they take the place of its methods."""

_STATED = ("embodiment", "history", "serves", "defers_images")


@dataclass(frozen=True, eq=False, kw_only=True)
class _Requested(Ask):
    """What ``request`` returned."""

    ticket: Any


class _Adapted(Policy):
    """A plain object that acts, as a policy.

    Args:
        plain: Has ``act`` and ``reset``.
    """

    def __init__(self, plain: Any) -> None:
        found = {
            name: getattr(plain, name, None) for name in (*_ACTING, *_SERVING, *_OPTIONAL, *_STATED)
        }
        own = {name: method for name, method in found.items() if callable(method)}
        if missing := [name for name in ("act", "reset") if name not in own]:
            raise ConfigError(
                f"a {type(plain).__name__} has no {' and no '.join(missing)}: a policy is a "
                "subclass of dzrobot.Policy, or has act and reset"
            )
        self._own: Mapping[str, Callable[..., Any]] = own
        self._numbered = "episode" in signature(plain.reset).parameters
        stated = found["embodiment"]
        self.embodiment = stated if isinstance(stated, Embodiment) else None
        self.history = found["history"] or "off"
        self._serves = found["serves"] is True and all(name in own for name in _SERVING)
        self._defers = "imagine_later" in own and bool(found["defers_images"])
        same = _SAME if self._defers else _SAME - {"imagine_later"}
        vars(self).update({name: method for name, method in own.items() if name in same})
        self._tell(plain)

    @property
    def can(self) -> Abilities:
        """Return what the methods of the plain object stand for."""
        own, delays = self._own, {}
        if "longest_delay" in own:
            methods: tuple[Method, ...] = get_args(Method)
            delays = {method: n for method in methods if (n := own["longest_delay"](method))}
        return Abilities(
            plans={"observe", "request", "result"} <= set(own),
            batches="act_batch" in own,
            serves=self._serves,
            continues=delays,
            predicts={"last_plan", "imagine"} <= set(own) and self.embodiment is not None,
            defers=self._defers,
        )

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode; a method without ``episode`` is not told its number."""
        super().reset(session)
        numbered = self._numbered and episode is not None
        self._own["reset"](session, **({"episode": episode} if numbered else {}))

    def end_all(self) -> None:
        """End all sessions; ``reset()`` did so in earlier versions."""
        (self._own.get("end_all") or self._own["reset"])()

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the action (A,) of the plain object."""
        action: Action = self._own["act"](obs, session=session)
        return action

    def observe(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> None:
        """Take in what the robot sees at this step."""
        super().observe(obs, session=session)
        self._own["observe"](obs, session=session)

    def ask(self, *, session: str = DEFAULT_SESSION, leftover: Leftover | None = None) -> Ask:
        """Return the question for a plan, with the ticket of ``request``."""
        asked = super().ask(session=session, leftover=leftover)
        ticket = self._own["request"](session=session, leftover=leftover)
        return _Requested(**vars(asked), ticket=ticket)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plans of ``result``; of a server's questions, of ``plan_batch``."""
        if asks and not isinstance(asks[0], _Requested):
            return self._served(asks)
        return [self._result(ask) for ask in asks]

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return whether the images of the next observation are looked at."""
        asked = {"acting": None, "planning": True, "moving": False}[when]
        reads = self._own.get("reads_frames")
        return reads is None or bool(reads(session=session, asked=asked))

    def _result(self, ask: Ask) -> Plan:
        plan: Plan | None = self._own["result"](ask.ticket) if isinstance(ask, _Requested) else None
        if plan is None:
            raise SessionError(
                f"the episode of session {ask.session!r} that asked for a plan is over"
            )
        return plan

    def _served(self, asks: Sequence[Ask]) -> list[Plan]:
        seen, names = [ask.observation for ask in asks], [ask.session for ask in asks]
        if "plan_batch" in self._own:
            return list(self._own["plan_batch"](seen, names, [ask.leftover for ask in asks]))
        answers = self._own["infer_batch"](seen, names)
        return [Plan.of(one["actions"], one["timing"]) for one in answers]

    def _tell(self, plain: Any) -> None:
        """Say once what the base class would do for such an object."""
        name = type(plain).__name__
        held = getattr(plain, "__dict__", {})
        inside = [value for value in held.values() if isinstance(value, Policy)]
        lost = {
            ability for one in inside for ability, has in vars(one.can).items()
            if has and not vars(self.can)[ability]
        }  # fmt: skip
        if lost:
            _say_once(
                f"{name} hides what the {type(inside[0]).__name__} in it can do "
                f"({', '.join(sorted(lost))}): a subclass of dzrobot.policies.Wrapper keeps it"
            )
        elif used := [method for method in _OPTIONAL if method in self._own]:
            _say_once(
                f"{name} has {', '.join(used)}: such methods of a plain object are used for the "
                "last version; make it a subclass of dzrobot.Policy (docs/extend/policy.md)"
            )


@cache
def _say_once(text: str) -> None:
    _log.warning("%s", text)
