"""An evaluation file of RLinf as the `dzrobot eval` that runs the same episodes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dzrobot.configuration import place_of
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import ConfigError, UnknownNameError
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.registration import LIBERO_SUITES
from dzrobot.training.recipes.rlinf_files import (
    OPEN,
    PRESETS,
    UNKNOWN,
    Composed,
    leaves,
    network_faults,
)
from dzrobot.training.recipes.rlinf_import import Note, refusal
from dzrobot.yaml_values import dotted

PROTOCOL, STEPS, EPISODES = "rlinf-500", 480, 50
"""What RLinf 0.3.0 does with an evaluation of LIBERO: every stored start once; and the limits of
that protocol here, from which a file may depart."""

_CACHED = (
    "env.group_name", "env.eval.wrap_obs_mode", "env.eval.seed", "env.eval.use_rel_reward",
    "env.eval.use_step_penalty", "env.eval.ignore_terminations", "env.eval.reward_coef",
    "env.eval.use_ordered_reset_state_ids", "env.eval.init_params", "env.eval.video_cfg",
    "env.eval.auto_reset", "env.eval.rollout_epoch", "env.eval.total_num_envs",
    "env.eval.max_steps_per_rollout_epoch", "env.enable_offload", "env.eval.enable_offload",
)  # fmt: skip
_UNUSED: Mapping[str, str] = {
    "actor": "an evaluation trains nothing",
    "algorithm": "an evaluation trains nothing",
    "data": "an evaluation reads no recordings",
    "defaults": "the network is --preset, the suite --suite",
    "cluster": "an evaluation on several machines is `dzrobot eval --ray`",
    "hydra": "there is no Hydra",
    "reward": "an evaluation trains nothing",
    "rollout": "one process plans for all simulators; --workers says how many there are",
    "runner": "the folder is --output",
    **dict.fromkeys(_CACHED, "changes no episode: every start is run once, in an environment of "
                    "its own"),
}  # fmt: skip
_SAME: Mapping[str, tuple[Any, ...]] = {
    "env.eval.env_type": ("libero",),
    "env.eval.group_size": (1,),
    "env.eval.is_eval": (True,),
    "env.eval.use_fixed_reset_state_ids": (True,),
    "env.eval.reset_gripper_open": (True,),
    "env.eval.libero_variant": ("standard",),
    "runner.max_epochs": (1, -1),
    "runner.only_eval": (True,),
    "runner.task_type": ("embodied_eval",),
    "rollout.model.model_type": ("dreamzero",),
    "rollout.model.is_lora": (False,),
    "rollout.model.state_horizon": (1,),
}
"""Fields with the values under which an episode is what it is here."""

_WHY: Mapping[str, str] = {
    "env.eval.env_type": "only LIBERO is evaluated with RLinf's files",
    "env.eval.group_size": "each start is run once",
    "env.eval.is_eval": "starts are drawn at random there; every stored start is run here",
    "env.eval.use_fixed_reset_state_ids": "starts are drawn at random there; every stored start is "
    "run here",
    "env.eval.reset_gripper_open": "the gripper is open while objects come to rest",
    "env.eval.libero_variant": "name a suite of LIBERO-PRO or LIBERO-Plus with --suite instead",
}
_READ = (
    "env.eval.task_suite_name", "env.eval.max_episode_steps", "env.eval.task_id_filter",
    "env.eval.video_cfg.save_video", "runner.ckpt_path", "runner.logger.log_path",
    "runner.logger.experiment_name", "rollout.model",
)  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "32": "float32", 32: "float32"}


@dataclass(frozen=True)
class ImportedEvaluation:
    """An evaluation file of RLinf, translated."""

    command: list[str]
    """`dzrobot eval` and its arguments."""

    missing: list[Note]
    """Files of defaults that do not lie beside the file, and what comes from the table of RLinf's
    defaults instead."""

    unused: list[Note]
    """Fields without effect here, and why."""

    @property
    def line(self) -> str:
        """Return the command as a shell takes it."""
        return shlex.join(self.command)


def is_evaluation(values: Mapping[str, Any]) -> bool:
    """Return whether a file of RLinf says how a policy is evaluated rather than trained."""
    runner, data = values.get("runner"), values.get("data")
    runner = runner if isinstance(runner, dict) else {}
    task = runner.get("task_type")
    if task is not None:
        return bool(task == "embodied_eval")
    trains = isinstance(data, dict) and data.get("train_data_paths") is not None
    return runner.get("only_eval") is True or (not trains and "env" in values)


def import_evaluation(file: Path, composed: Composed) -> ImportedEvaluation:
    """Return an evaluation file of RLinf as a command.

    Raises:
        ConfigError: Some field has a meaning that an evaluation here cannot have; all are listed.
    """
    work = _Import(composed)
    work.read_fields()
    command = ["dzrobot", "eval", "--protocol", PROTOCOL]
    for part in (work.episodes, work.policy, work.output):
        command += part()
    if work.refused:
        raise ConfigError(refusal(file, work.refused))
    missing = [(f"{name}.yaml", _tabled(composed, name)) for name in composed.missing]
    return ImportedEvaluation(command, missing, work.unused)


def _tabled(composed: Composed, file: str) -> str:
    taken = [
        f"{dotted(place)}={value}"
        for place, value in leaves(composed.values)
        if composed.origins.get(dotted(place)) == file and dotted(place) not in composed.written
    ]
    return ", ".join(taken) or "the file says itself what an evaluation takes from there"


@dataclass
class _Import:
    composed: Composed
    refused: list[Note] = field(default_factory=list)
    unused: list[Note] = field(default_factory=list)

    def at(self, name: str) -> Any:
        inner: Any = self.composed.values
        for key in place_of(name):
            inner = inner.get(key) if isinstance(inner, dict) else None
        return None if inner == OPEN else inner

    def read_fields(self) -> None:
        """Refuse what an evaluation here cannot do, and list what has no effect."""
        for place, value in leaves(self.composed.values):
            theirs = dotted(place)
            above = [".".join(map(str, place[:n])) for n in range(len(place), 0, -1)]
            if theirs in _SAME:
                if value is not None and value not in _SAME[theirs]:
                    why = _WHY.get(theirs, "has no counterpart")
                    self.refused.append((theirs, f"{value}: {why}"))
            elif any(name in _READ for name in above):
                continue
            elif known := next((name for name in above if name in _UNUSED), None):
                if theirs in self.composed.written:
                    self.unused.append((theirs, _UNUSED[known]))
            elif value is not None:
                self.refused.append((theirs, UNKNOWN))
        if self.at("env.eval.is_eval") is None:
            self.refused.append(("env.eval.is_eval", _WHY["env.eval.is_eval"]))

    def episodes(self) -> list[str]:
        """Return which episodes are run, and how long."""
        suite = self.at("env.eval.task_suite_name")
        found = next((known for known in LIBERO_SUITES if known.name == suite), None)
        if found is None:
            names = ", ".join(known.name for known in LIBERO_SUITES)
            self.refused.append(("env.eval.task_suite_name", f"{suite or 'not given'}: give one "
                                 f"of {names}"))  # fmt: skip
            return []
        flags = ["--suite", found.name]
        steps = self.at("env.eval.max_episode_steps")
        if not isinstance(steps, int):
            self.refused.append(("env.eval.max_episode_steps", "is needed: steps of an episode"))
            return flags
        if steps != STEPS:
            flags += ["--max-steps", str(steps)]
        tasks = self.at("env.eval.task_id_filter")
        if tasks is not None:
            flags += ["--tasks", ",".join(map(str, sorted(set(tasks))))]
        return [*flags, *self._per_task(steps, len(set(tasks)) if tasks else found.tasks, tasks)]

    def _per_task(self, steps: int, tasks: int, chosen: Sequence[int] | None) -> list[str]:
        """Return how many starts of each task there is time for."""
        envs = self.at("env.eval.total_num_envs")
        per_epoch = self.at("env.eval.max_steps_per_rollout_epoch")
        if not isinstance(envs, int):
            return []
        laps = per_epoch // steps if isinstance(per_epoch, int) else 1
        runs = envs * (laps if self.at("env.eval.auto_reset") else 1)
        runs *= self.at("env.eval.rollout_epoch") or 1
        starts = tasks * EPISODES
        if runs >= starts:
            return []
        # Starts are gone through task by task within each of their numbers.
        if chosen is None and runs % tasks == 0:
            return ["--episodes", str(runs // tasks)]
        self.refused.append(
            ("env.eval.total_num_envs", f"there is time for {runs} episodes, of {starts} starts: "
             f"{runs} are not an equal share of {tasks} tasks; give more, or a multiple of {tasks} "
             "without task_id_filter")
        )  # fmt: skip
        return []

    def policy(self) -> list[str]:
        """Return which policy acts, and how."""
        weights, folder = self.at("runner.ckpt_path"), self.at("rollout.model.model_path")
        flags = ["--checkpoint", str(weights or folder)]
        if weights is None and folder is None:
            self.refused.append(("runner.ckpt_path", "is needed: the weights to evaluate, or "
                                 "rollout.model.model_path"))  # fmt: skip
        metadata = self.at("rollout.model.metadata_json_path")
        if weights is not None and folder is not None:
            flags += ["--config-from", str(folder)]
        elif weights is not None:
            flags += self._preset()
        if metadata is not None:
            flags += ["--metadata", str(metadata)]
        tag = self.at("rollout.model.embodiment_tag")
        if tag is not None:
            flags += ["--embodiment", str(tag), *self._executed(str(tag))]
        precision = self.at("rollout.model.precision")
        if precision in _DTYPES:
            flags += ["--dtype", _DTYPES[precision]]
        self._components()
        return flags

    def _preset(self) -> list[str]:
        files = (*self.composed.read, *self.composed.missing)
        named = [PRESETS[name] for name in files if name in PRESETS]
        named += [PRESETS.get(f"model/{self.at('rollout.model.dreamzero_preset')}", "")]
        if not named[0]:
            self.refused.append(
                ("defaults", "name no network: add model/dreamzero_5b or model/dreamzero_14b, or "
                 "give rollout.model.model_path")
            )  # fmt: skip
            return []
        model = self.at("rollout.model")
        if isinstance(model.get("action_head_cfg"), dict) and (
            "_target_" in model["action_head_cfg"]
        ):
            self.refused += network_faults(model, named[0], "rollout.model")
        self._frame_size(named[0])
        return ["--preset", named[0]]

    def _frame_size(self, chosen: str) -> None:
        """Refuse frames of another size than the published network's."""
        sides = ("target_video_height", "target_video_width")
        there = tuple(self.at(f"rollout.model.{side}") for side in sides)
        here = preset(chosen).target_size
        if None not in there and there != here:
            self.refused.append(
                ("rollout.model.target_video_height", f"{there[0]} x {there[1]}: --preset {chosen} "
                 f"has {here}; give rollout.model.model_path, a folder whose config.json says it")
            )  # fmt: skip

    def _executed(self, tag: str) -> list[str]:
        """Return how many actions of a plan are executed, where the robot's own number differs."""
        count = self.at("rollout.model.num_action_chunks")
        try:
            robot = load_embodiment(tag)
        except UnknownNameError as error:
            self.refused.append(("rollout.model.embodiment_tag", str(error)))
            return []
        horizon = self.at("rollout.model.action_horizon") or robot.timing.action_horizon
        if horizon != robot.timing.action_horizon:
            self.refused.append(
                ("rollout.model.action_horizon", f"{horizon}: {tag} plans "
                 f"{robot.timing.action_horizon} actions; a checkpoint of another horizon says so "
                 "in its config.json: give rollout.model.model_path")
            )  # fmt: skip
        own = robot.execute or robot.timing.action_horizon
        return [] if count in (None, own) else ["--execute", str(count)]

    def _components(self) -> None:
        """List what the weights of the checkpoint make superfluous."""
        read = {
            "model_path", "metadata_json_path", "embodiment_tag", "num_action_chunks", "precision",
            "action_horizon", "dreamzero_preset",
        }  # fmt: skip
        for name in sorted(self.composed.written):
            inner = name.removeprefix("rollout.model.")
            if inner == name or inner in read or name in _SAME:
                continue
            reason = (
                "a checkpoint has the weights of every part" if inner.endswith("_pretrained_path")
                else "the network's config.json says it"
            )  # fmt: skip
            self.unused.append((name, reason))

    def output(self) -> list[str]:
        """Return where results and films go."""
        folder = self.at("runner.logger.log_path")
        name = self.at("runner.logger.experiment_name")
        flags = []
        if folder is not None:
            flags += ["--output", str(Path(str(folder), str(name or "")))]
        films = self.at("env.eval.video_cfg.save_video")
        if isinstance(films, bool):
            flags += ["--videos", "all" if films else "none"]
        return flags
