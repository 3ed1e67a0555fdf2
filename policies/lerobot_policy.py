"""Policies of LeRobot (ACT, diffusion, SmolVLA, pi0, ...), in LeRobot's own Python environment.

LeRobot pins other versions of torch and transformers than this package, so such a policy is served
from there (``dzrobot serve lerobot:ID``) and acts here through the server. Nothing but LeRobot and
the packages of ``requirements/robot.txt`` is needed there. Source: lerobot 0.4.4 and 0.6.1,
``policies/factory.py``, ``scripts/lerobot_eval.py``.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from dzrobot.embodiments.spec import Embodiment
from dzrobot.embodiments.timing import Timing
from dzrobot.errors import CheckpointError, ConfigError, SessionError, preview
from dzrobot.modality.window import Observation, read_observation
from dzrobot.policies.base import (
    DEFAULT_SESSION,
    Ask,
    Footprint,
    Plan,
    Policy,
    check_leftovers,
    check_session,
)
from dzrobot.policies.dreamzero.checkpoints.checksums import files_hash
from dzrobot.policies.dreamzero.checkpoints.hub import commit_of, fetch, local_path, pinned
from dzrobot.rng import torch_seed

_IMAGE, _STATE, _TASK, _ACTION = "VISUAL", "STATE", "task", "action"
_LEAST_HORIZON = 4
"""Fewest actions of one plan that a robot's timing may have."""


def check_installed(name: str, robot: Embodiment) -> None:
    """Check that this Python has LeRobot.

    Args:
        name: Of the policy, ``lerobot:ID_OR_FOLDER``.
        robot: Who acts.

    Raises:
        ConfigError: it has not.
    """
    try:
        metadata.version("lerobot")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{name} needs LeRobot, which pins other versions of torch than this package. "
            "Either name the Python of an environment that has it: --lerobot-python "
            f"/path/to/bin/python; or serve it there: dzrobot serve {name} --embodiment "
            f"{robot.tag}, and evaluate with --server"
        ) from None


@dataclass(eq=False)
class _Session:
    """What a policy keeps of one episode."""

    number: int
    """Number that noise depends on."""

    kept: dict[str, Any]
    """Attributes of the policy that its ``reset`` makes anew."""

    calls: int = 0


class LeRobotPolicy(Policy):
    """Acts as a policy of LeRobot does, with its saved processors.

    A policy that sees one observation hands out whole chunks, of which it executes
    ``n_action_steps``. One that keeps several observations (diffusion policy), or averages over
    chunks (temporal ensembling), is asked at every step.

    Noise is drawn from a generator that is a function of seed, episode and call.

    Args:
        source: Folder or Hugging Face id.
        embodiment: The robot; its dataset columns are the policy's features.
        device: Where it runs.
        seed: Of its noise.
        revision: Branch, tag or commit of a Hugging Face id; None: the newest.

    Raises:
        CheckpointError: the policy needs what the robot has not, or gives other actions.
    """

    def __init__(
        self,
        source: str,
        embodiment: Embodiment,
        *,
        device: str = "cpu",
        seed: int = 0,
        revision: str | None = None,
    ) -> None:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        # Fetched once, so that weights, settings and processors are of one commit.
        name, wanted = pinned(source, revision)
        folder = local_path(source, revision) or fetch(str(name), wanted, ["*"])
        place = str(folder)
        config: Any = PreTrainedConfig.from_pretrained(place)
        config.device = device
        self._policy: Any = get_policy_class(config.type).from_pretrained(place, config=config)
        self._policy.eval().to(device)
        self._before, self._after = make_pre_post_processors(
            policy_cfg=config, pretrained_path=place,
            preprocessor_overrides={"device_processor": {"device": device}},
        )  # fmt: skip
        self._source, self._seed, self._config = source, seed, config
        kept = (file for end in ("safetensors", "json") for file in folder.rglob(f"*.{end}"))
        self._weights, self._commit = files_hash(kept), commit_of(folder)
        self._images, self._parts = _features(source, config, embodiment)
        self._chunks = _plans_chunks(config)
        steps = int(config.n_action_steps) if self._chunks else 1
        self.embodiment: Embodiment = _planning(embodiment, steps)
        """The robot, with plans as long as the policy's."""

        self.execute = self.embodiment.execute

        self._episodes: dict[str, _Session] = {}

    @property
    def card(self) -> dict[str, Any]:
        """Return what the actions depend on, as plain values for records."""
        return {
            "policy": f"lerobot:{self._source}",
            "weights": self._weights,
            **({"commit": self._commit} if self._commit else {}),
            "type": self._config.type,
            "lerobot": metadata.version("lerobot"),
            "torch": metadata.version("torch"),
            "asked": "for chunks" if self._chunks else "at every step",
            "execute": self.embodiment.execute,
            "seed": self._seed,
        }

    def end_all(self) -> None:
        """End all sessions."""
        super().end_all()
        self._episodes.clear()

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``; nothing of the one before survives."""
        super().reset(session)
        last = self._episodes.get(session)
        counted = 0 if last is None else last.number + 1
        # What another session keeps is not reset with it.
        vars(self._policy).update(copy.deepcopy(_kept(self._policy)))
        self._policy.reset()
        number = counted if episode is None else episode
        self._episodes[session] = _Session(number, copy.deepcopy(_kept(self._policy)))

    def evict(self, session: str) -> None:
        """End ``session``."""
        self._open(session)
        super().evict(session)
        del self._episodes[session]

    def footprint(self, session: str) -> Footprint:
        """Return a session's memory, a few numbers, and what is left."""
        self._open(session)
        return Footprint(session=2**20, free=2**30)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plan of each question, as ``select_action`` and the postprocessor do.

        Each is made alone, so its bits do not depend on the others.

        Raises:
            ConfigError: A plan is to continue another, which no policy of LeRobot does.
            ModalityError: An observation does not fit the robot; all sessions are as they were.
            SessionError: A session was not reset.
        """
        check_leftovers(self, [ask.leftover for ask in asks])
        states = [self._open(ask.session) for ask in asks]
        seen = [read_observation(ask.observation, self.embodiment)[-1] for ask in asks]
        return [self._infer(one, state) for one, state in zip(seen, states, strict=True)]

    def _infer(self, seen: Observation, state: _Session) -> Plan:
        import torch

        began = time.perf_counter()
        # Deep copies beforehand: a policy may change what it keeps in place.
        vars(self._policy).update(copy.deepcopy(state.kept))
        devices = [self._config.device] if str(self._config.device).startswith("cuda") else []
        with torch.inference_mode(), torch.random.fork_rng(devices):
            torch.manual_seed(torch_seed("lerobot", self._seed, state.number, state.calls))
            batch = self._before(self._batch(seen))
            if self._chunks:
                chunk = self._policy.predict_action_chunk(batch)
                rows = [self._after(chunk[:, step]) for step in range(chunk.shape[1])]
            else:
                rows = [self._after(self._policy.select_action(batch))]
        state.kept, state.calls = _kept(self._policy), state.calls + 1
        actions = np.ascontiguousarray(torch.cat(rows).float().cpu().numpy())
        return Plan.of(actions, {"total_ms": 1000 * (time.perf_counter() - began)})

    def _batch(self, seen: Observation) -> dict[str, Any]:
        """Return an observation in LeRobot's form: images (1, 3, H, W) in [0, 1], states (1, D)."""
        import torch

        batch: dict[str, Any] = {_TASK: [seen[self.embodiment.language]]}
        for feature, key in self._images.items():
            image = torch.from_numpy(np.asarray(seen[key])).permute(2, 0, 1)[None]
            batch[feature] = image.contiguous().float() / 255
        for feature, keys in self._parts.items():
            numbers = np.concatenate([np.asarray(seen[key], np.float32) for key in keys])
            batch[feature] = torch.from_numpy(numbers)[None]
        return batch

    def _open(self, session: str) -> _Session:
        check_session(session)
        if session not in self._episodes:
            raise SessionError(f"session {session!r} is not open: call reset({session!r}) first")
        return self._episodes[session]


def _plans_chunks(config: Any) -> bool:
    """Return whether a chunk depends on one observation alone, and is executed as it is."""
    fields = vars(config)
    ensembles = fields.get("temporal_ensemble_coeff") is not None
    return fields.get("n_obs_steps") == 1 and "n_action_steps" in fields and not ensembles


def _planning(robot: Embodiment, steps: int) -> Embodiment:
    """Return ``robot`` with plans of which ``steps`` rows are executed."""
    timing = robot.timing
    if steps >= _LEAST_HORIZON and steps != timing.action_horizon:
        timing = Timing(control_hz=timing.control_hz, action_horizon=steps)
    return replace(robot, timing=timing, execute=steps)


def _features(
    source: str, config: Any, robot: Embodiment
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return which view each image feature is, and which state parts each state feature holds.

    Raises:
        CheckpointError: a feature is none of the robot's, or the actions have another size.
    """
    views = {name: view.key for view in robot.views for name in (view.feature, *view.aliases)}
    images, parts, faults = {}, {}, []
    for name, feature in config.input_features.items():
        shape = tuple(feature.shape)
        if feature.type.name == _IMAGE:
            if name in views:
                images[name] = views[name]
            else:
                faults.append(f"it wants the image {name}, the robot has {preview(views)}")
        elif feature.type.name == _STATE:
            own = [part for part in robot.state if name in (part.feature, *part.aliases)]
            own.sort(key=lambda part: part.start or 0)
            if (math.prod(shape),) == (sum(part.dim for part in own),):
                parts[name] = [part.key for part in own]
            else:
                faults.append(f"it wants {name} {shape}, the robot has {_sizes(robot)}")
        else:
            faults.append(f"it wants {name} of type {feature.type.name}, which no robot here has")
    action = config.output_features.get(_ACTION)
    if action is None or tuple(action.shape) != (robot.action_dim,):
        given = None if action is None else tuple(action.shape)
        faults.append(f"its actions are {given}, the robot's ({robot.action_dim},)")
    if faults:
        raise CheckpointError(f"lerobot:{source} does not fit {robot.tag}: {'; '.join(faults)}")
    return images, parts


def _sizes(robot: Embodiment) -> str:
    return ", ".join(f"{part.feature} {part.key} ({part.dim},)" for part in robot.state)


def _kept(policy: Any) -> dict[str, Any]:
    """Return what a policy keeps of an episode: its queues, and helpers that are not networks."""
    import torch

    own = vars(torch.nn.Module()).keys() | {"config"}
    found = {}
    for name, value in vars(policy).items():
        helper = type(value).__module__.startswith("lerobot.") and not isinstance(
            value, torch.nn.Module
        )
        if name not in own and (isinstance(value, deque | dict | list | torch.Tensor) or helper):
            found[name] = value
    return found
