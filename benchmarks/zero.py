"""Does `dzrobot doctor policy` name what was put wrong? One fault at a time, and what it says.

    dzrobot collect --env dzrobot/lift-v0 --env-arg resolution=128 --embodiment libero_mini \
        --episodes 6 --hold-steps 8 --output demonstrations
    python benchmarks/zero.py demonstrations results

    dzrobot collect --env dzrobot/libero_object-v0 --env-arg task_id=2 --env-arg resolution=128 \
        --embodiment libero_mini --episodes 4 --starts 0-3 --hold-steps 8 --max-steps 280 \
        --output of_libero
    python benchmarks/zero.py of_libero results_libero --world libero

    python benchmarks/zero.py lift_20 results_act --world act --lerobot FOLDER --python PYTHON

Faults are put between environment, data and the bundled policy, or an ACT that LeRobot trained, by
code of this file alone: data are rewritten on disk, checkpoints edited, environments and policies
wrapped. ``results/zero.jsonl``
gets a line for each; the same command again runs what is missing. A fault that is harmless to this
policy is right when it is named as a difference and not as a cause.
"""

import argparse
import io
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dzrobot  # noqa: F401 (registers the environments)
from dzrobot.cli import main as run_command
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.base import Plan
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.policies.wrapping import Wrapper
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.fingerprint import trained_inputs

VIEWS = ("video.image", "video.wrist_image")
ROBOT = ("--embodiment", "libero_mini")
STATE, TASK = "state.state", "annotation.task"


def _cropped(image):
    return cv2.resize(image[12:116, 12:116], (128, 128))


def _boxed(image):
    return cv2.copyMakeBorder(cv2.resize(image, (128, 96)), 16, 16, 0, 0, cv2.BORDER_CONSTANT)


def _halved(image):
    small = cv2.resize(image, (64, 64), interpolation=cv2.INTER_AREA)
    return cv2.resize(small, (128, 128), interpolation=cv2.INTER_NEAREST)


def _placed(image, across, degrees):
    high, wide = image.shape[:2]
    turned = cv2.getRotationMatrix2D(((wide - 1) / 2, (high - 1) / 2), degrees, 1.0)
    turned[0, 2] += across * wide
    return cv2.warpAffine(np.ascontiguousarray(image), turned, (wide, high))


def _state(change):
    def put(seen):
        state = seen[STATE].copy()
        change(state)
        return {**seen, STATE: state.astype(np.float32)}

    return put


def _images(change, keys=VIEWS):
    return lambda seen: {
        key: np.ascontiguousarray(change(value)) if key in keys else value
        for key, value in seen.items()
    }


def _other_camera(seen):
    one, two = VIEWS
    return {**seen, one: seen[two], two: seen[one]} if one in seen else seen


def _reversed(numbers, state):
    state[numbers] = state[numbers][::-1].copy()


def _times(numbers, factor, state):
    state[numbers] *= factor


SEEN: Mapping[str, Callable[[dict], dict]] = {
    "upside down": _images(lambda v: v[::-1]),
    "turned 180": _images(lambda v: v[::-1, ::-1]),
    "BGR": _images(lambda v: v[..., ::-1]),
    "cameras swapped": _other_camera,
    "wrist black": _images(np.zeros_like, VIEWS[1:]),
    "crop": _images(_cropped),
    "letterbox": _images(_boxed),
    "half resolution": _images(_halved),
    "state rotation reversed": _state(partial(_reversed, slice(3, 6))),
    "state position in mm": _state(partial(_times, slice(0, 3), 1000)),
    "fingers exchanged": _state(partial(_reversed, slice(6, 8))),
    "state zero": _state(partial(_times, slice(None), 0)),
    "prompt replaced": lambda seen: {**seen, TASK: "close the drawer"},
    "mirrored wrist": _images(lambda v: v[:, ::-1], VIEWS[1:]),
    "turned 90": _images(np.rot90),
    "shifted": _images(lambda v: _placed(v, 1 / 6, 0)),
    "camera turned by 8 degrees": _images(lambda v: _placed(v, 0, 8)),
    "white balance": _images(lambda v: (v * [0.55, 0.9, 1.0]).astype(np.uint8)),
    "faded": _images(lambda v: (0.4 * v + 130).astype(np.uint8)),
    "state rotation in degrees": _state(partial(_times, slice(3, 6), 180 / np.pi)),
    "state y mirrored": _state(partial(_times, 1, -1)),
}


def _gripper(action):
    return action * np.array([1, 1, 1, 1, 1, 1, -1], np.float32)


class FaultyEnv(gym.Wrapper):
    """An environment with one fault in what is seen, or in what is done."""

    takes_missing_frames = True

    def __init__(self, env, fault):
        super().__init__(env)
        self.fault, self.frames = fault, []

    def reset(self, **given):
        """Begin an episode."""
        seen, info = self.env.reset(**given)
        self.frames = []
        return self._seen(seen), info

    def step(self, action):
        """Carry out ``action``, or what the fault makes of it."""
        if self.fault == "gripper sign at env":
            action = _gripper(action)
        done = self.env.step(action)
        if self.fault == "half rate" and not (done[2] or done[3]):
            done = self.env.step(action)
        return (self._seen(done[0]), *done[1:])

    def _seen(self, seen):
        if self.fault in SEEN:
            return SEEN[self.fault](seen)
        late = {"images 3 steps late": 3, "static camera": 10**6}.get(self.fault)
        if late is None:
            return seen
        self.frames.append({key: seen[key] for key in VIEWS if key in seen})
        return {**seen, **self.frames[max(0, len(self.frames) - 1 - late)]}


class DrawingEnv(FaultyEnv):
    """The same, where every image is needed."""

    takes_missing_frames = False


def faulty(  # noqa: PLR0913 - keyword arguments of gym.make
    *,
    name: str = "dzrobot/lift-v0",
    fault: str = "",
    task_id: int | None = None,
    resolution: int = 128,
    settle_steps: int = 10,
    cameras: bool = True,
    stop_on_success: bool = True,
    render_mode: str | None = None,
):
    """Make an environment with a fault; ``--env benchmarks.zero:faulty --env-arg fault=NAME``."""
    env = gym.make(
        name, disable_env_checker=True, resolution=resolution, settle_steps=settle_steps,
        cameras=cameras, stop_on_success=stop_on_success, max_episode_steps=10**6,
        **({} if task_id is None else {"task_id": task_id}),
    ).unwrapped  # fmt: skip
    drawn = fault in ("images 3 steps late", "static camera")
    return (DrawingEnv if drawn and cameras else FaultyEnv)(env, fault)


class Convention(Wrapper):
    """A policy as it would be, had it been trained on data that mean something else."""

    def __init__(self, policy, rows):
        super().__init__(policy)
        self.rows = rows

    def act_batch(self, observations, sessions):
        """Return the actions in the other convention."""
        acted = super().act_batch(observations, sessions)
        states = [one[STATE] for one in observations]
        return [self.rows(a[None], s[None])[0] for a, s in zip(acted, states, strict=True)]

    def plan(self, asks):
        """Return the plans in the other convention."""
        plans = super().plan(asks)
        return [
            Plan.of(self.rows(plan.actions, np.repeat(ask.observation[STATE][None], 8, 0)))
            for ask, plan in zip(asks, plans, strict=True)
        ]


class Turning(Wrapper):
    """A policy whose own code turns its images."""

    def __init__(self, policy, name):
        super().__init__(policy)
        self.turned = SEEN[name]

    def act_batch(self, observations, sessions):
        """Act on turned images."""
        return super().act_batch(list(map(self.turned, observations)), sessions)

    def plan(self, asks):
        """Plan on turned images."""
        turned = [replace(one, observation=self.turned(one.observation)) for one in asks]
        return super().plan(turned)


def _poses(actions, states):
    out = actions.copy()
    out[:, :3] = states[: len(out), :3] + 0.05 * actions[:, :3]
    turns = [cv2.Rodrigues(0.5 * turn.astype(np.float64))[0] for turn in actions[:, 3:6]]
    now = [cv2.Rodrigues(one.astype(np.float64))[0] for one in states[: len(out), 3:6]]
    out[:, 3:6] = [cv2.Rodrigues(a @ b)[0][:, 0] for a, b in zip(turns, now, strict=True)]
    return out


def _columns(order=range(7), signs=(1,) * 7):
    return lambda actions, _: actions[:, list(order)] * np.array(signs, np.float32)


def _ahead(actions, _):
    return np.concatenate([actions[2:], np.repeat(actions[-1:], min(2, len(actions)), 0)])[
        : len(actions)
    ]


ROWS: Mapping[str, Callable[[Any, Any], Any]] = {
    "gripper sign in data": lambda actions, _: _gripper(actions),
    "scale 0.4 in data": _columns(signs=(0.4,) * 6 + (1,)),
    "x and y exchanged in data": _columns(order=(1, 0, 2, 3, 4, 5, 6)),
    "actions 2 rows off in data": _ahead,
    "absolute instead of delta": _poses,
    "z mirrored in data": _columns(signs=(1, 1, -1, 1, 1, 1, 1)),
    "rotation order in data": _columns(order=(0, 1, 2, 5, 4, 3, 6)),
}


@dataclass(frozen=True)
class World:
    """Where faults are put."""

    env: tuple[str, ...]
    """Arguments that :func:`faulty` makes it with."""

    task: str
    """Name of the bundled checkpoint that acts there."""

    other: str
    """Name of the one that was trained on something else."""

    history: str
    faults: tuple[str, ...] | None = None
    """Names of those that are put there; None: all."""

    harmless: Mapping[str, str] = field(default_factory=dict)
    """Faults with which the policy succeeds here as without them, by `dzrobot eval`, and the word
    that names the difference."""

    lerobot: Path | None = None
    """Folder of the policy of LeRobot that acts there; None: the bundled one does."""

    python: str = ""
    """Python of the environment that has LeRobot."""

    @property
    def flags(self) -> list[str]:
        """Return how its policy acts."""
        return ["--solver-steps", "4", "--history", self.history]

    def policy(self, folder: Path) -> list[str]:
        """Return the flags that name LeRobot's policy in a folder."""
        return ["--policy", f"lerobot:{folder}", "--lerobot-python", self.python, *ROBOT]

    def chosen(self, faults: "Sequence[Fault]") -> "list[Fault]":
        """Return those of ``faults`` that are put here, in the order in which they are run."""
        by_name = {one.name: one for one in faults}
        named = [by_name[name] for name in self.faults or by_name]
        return [
            replace(one, words=(self.harmless[one.name],), harmless=True)
            if one.name in self.harmless
            else one
            for one in named
        ]


WORLDS = {
    "lift": World(
        (), "lift", "libero_object", "recent",
        harmless={"state y mirrored": "negative of", "fingers exchanged": "are exchanged"},
    ),
    "libero": World(
        ("name=dzrobot/libero_object-v0", "task_id=2"), "libero_object", "lift", "off",
        (
            "none", "upside down", "gripper sign in data", "cameras swapped", "wrist black",
            "half resolution", "crop", "state rotation reversed",
            "mean and deviation as quantiles", "another task's checkpoint",
            "x and y exchanged in data", "whole plan executed", "state position in mm",
        ),
        {"whole plan executed": "execute"},
    ),
    "act": World(
        (), "lift", "libero_object", "recent",
        (
            "none", "upside down", "cameras swapped", "gripper sign in data",
            "x and y exchanged in data", "state rotation reversed", "state position in mm",
        ),
        {"cameras swapped": "recorded as"},
    ),
}  # fmt: skip
"""The faults of LIBERO, and all but two of LeRobot's policy, were chosen before any was run there;
those of the state were added when exchanged cameras proved harmless to that policy."""


def _policy(world):
    options = PolicyOptions(solver_steps=4, history=world.history)
    return DreamZeroPolicy.from_pretrained(default_checkpoint(world.task), options=options)


def _conventional(world, rows):
    return lambda robot: Convention(_policy(world), rows)


for _world in WORLDS.values():
    for _number, _rows in enumerate(ROWS.values()):
        globals()[f"{_world.task}_policy_{_number}"] = _conventional(_world, _rows)


def blindfold(robot):
    """Make a policy that turns its images upside down."""
    return Turning(_policy(WORLDS["lift"]), "upside down")


def of_turned_images(robot):
    """Make a policy as it would be, had it been trained on images turned by 180 degrees."""
    return Turning(_policy(WORLDS["lift"]), "turned 180")


def rewrite(data: Path, folder: Path, rows: Callable[[Any, Any], Any]) -> Path:
    """Write ``data`` again with other actions."""
    shutil.copytree(data, folder)
    for file in sorted((folder / "data").rglob("*.parquet")):
        table = pq.read_table(file)
        actions, states = (
            np.array(table[name].to_pylist(), np.float32)
            for name in ("action", "observation.state")
        )
        at = table.schema.get_field_index("action")
        values = pa.array(rows(actions, states).tolist(), table.schema.field(at).type)
        pq.write_table(table.set_column(at, table.schema.field(at), values), file)
    return folder


def turn_images(data: Path, folder: Path) -> Path:
    """Write ``data``, which hold single images, again with all of them turned by 180 degrees."""
    shutil.copytree(data, folder)
    for file in sorted((folder / "data").rglob("*.parquet")):
        table = pq.read_table(file)
        for at, column in enumerate(table.schema):
            if column.name.startswith("observation.images"):
                cells = [_turned(one) for one in table[column.name].to_pylist()]
                table = table.set_column(at, column, pa.array(cells, column.type))
        pq.write_table(table, file)
    return folder


def _turned(cell):
    image = cv2.imdecode(np.frombuffer(cell["bytes"], np.uint8), cv2.IMREAD_COLOR)
    return {**cell, "bytes": cv2.imencode(".png", image[::-1, ::-1])[1].tobytes()}


@dataclass(frozen=True)
class Fault:
    """A fault, and the words that a right answer holds."""

    name: str
    words: tuple[str, ...]
    harmless: bool = False
    own: bool = False
    """Whether it is none of those that thresholds were looked at with."""


FAULTS = (
    Fault("none", ()),
    *(Fault(name, (word,)) for name, word in (
        ("gripper sign in data", "gripper sign"), ("scale 0.4 in data", "scale"),
        ("x and y exchanged in data", "axes exchanged"), ("actions 2 rows off in data", "off by"),
        ("absolute instead of delta", "absolute"), ("upside down", "upside down"),
        ("turned 180", "turned by 180"), ("cameras swapped", "recorded as"),
        ("wrist black", "one color"), ("crop", "cropped"), ("letterbox", "letterboxed"),
        ("state rotation reversed", "numbers 3, 5"), ("state position in mm", "1000 times"),
        ("fingers exchanged", "are exchanged"), ("state zero", "0 throughout"),
        ("gripper sign at env", "gripper sign"), ("whole plan executed", "--execute 8"),
        ("statistics of libero_object", "statistics"),
        ("statistics twice as wide", "statistics"), ("random weights", "weights"),
    )),
    *(Fault(name, (word,), harmless=True) for name, word in (
        ("BGR", "red and blue"), ("half resolution", "resolution"),
        ("prompt replaced", "close the drawer"), ("images 3 steps late", "steps late"),
        ("half rate", "rate"), ("no settle steps", "state"),
    )),
    *(Fault(name, (word,), own=True) for name, word in (
        ("mirrored wrist", "mirrored"), ("turned 90", "turned by 90"),
        ("static camera", "same image"), ("state rotation in degrees", "degrees"),
        ("state y mirrored", "negative of"), ("z mirrored in data", "mirrored"),
        ("rotation order in data", "rotation order"),
        ("mean and deviation as quantiles", "statistics"),
        ("another task's checkpoint", "other data"), ("policy turns its images", "upside down"),
        ("images turned 180 in data", "turned by 180"), ("shifted", "% to the right"),
        ("camera turned by 8 degrees", "turned by 8 degrees"),
        ("white balance", "times as red"), ("faded", "times the contrast"),
    )),
)  # fmt: skip


def command(fault: Fault, world: World, data: Path, work: Path) -> list[str]:
    """Return the arguments of ``dzrobot`` for a fault, once it is put."""
    # Beside this script; not there for whoever imports the environment alone.
    from zero_checkpoints import STATISTICS, edited, relearned

    name, folder = fault.name, work / fault.name.replace(" ", "_").replace("'", "")
    shutil.rmtree(folder, ignore_errors=True)
    env = ["--env", "benchmarks.zero:faulty"]
    for argument in (f"fault={json.dumps(name)}", *world.env):
        env += ["--env-arg", argument]
    policy = ["--checkpoint", str(default_checkpoint(world.task)), *world.flags]
    if world.lerobot is not None:
        policy = world.policy(world.lerobot)
    if name in ROWS and world.lerobot is not None:
        learned = relearned(world.lerobot, folder / "policy", ROWS[name])
        policy, data = world.policy(learned), rewrite(data, folder / "data", ROWS[name])
    elif name in ROWS:
        number = list(ROWS).index(name)
        policy, data = (
            ["--policy", f"benchmarks.zero:{world.task}_policy_{number}", *ROBOT],
            rewrite(data, folder, ROWS[name]),
        )
    elif name == "policy turns its images":
        policy = ["--policy", "benchmarks.zero:blindfold", *ROBOT]
    elif name == "images turned 180 in data":
        policy = ["--policy", "benchmarks.zero:of_turned_images", *ROBOT]
        data = turn_images(data, folder)
    elif name in (*STATISTICS, "random weights", "another task's checkpoint"):
        trained = world.other if name == "another task's checkpoint" else world.task
        source = default_checkpoint(trained)
        policy = ["--checkpoint", str(edited(source, folder, name)), *world.flags]
    elif name == "whole plan executed":
        policy += ["--execute", "8"]
    elif name == "no settle steps":
        env += ["--env-arg", "settle_steps=0"]
    where = ["--dataset", str(data), "--episodes", "3"]
    return ["doctor", "policy", *policy, *where, *env, "--json"]


def judged(fault: Fault, found: Mapping[str, Any]) -> str:
    """Return ``right``, ``pair``, ``wrong`` or ``none``."""
    causes = found["causes"]
    if not fault.words:
        return "wrong" if causes else "right"
    if fault.harmless:
        shown = [one["found"] + one["what"] for one in found["measurements"] if one["differs"]]
        if causes:
            return "wrong"
        return "right" if any(fault.words[0] in one for one in shown) else "none"
    if not causes:
        return "none"
    if not any(word in cause for word in fault.words for cause in [*causes, found["sentence"]]):
        return "wrong"
    alone = len(causes) == 1 and ", or are " not in causes[0]
    return "right" if alone else "pair"


def compare_first(data: Path, starts: int) -> None:
    """Print how often the first observation of Lift is called unlike the data, by fault."""
    robot = load_embodiment("libero_mini")
    reader = DatasetReader(data, robot, ReaderOptions(empty="count"))
    trained = trained_inputs([reader], robot)
    env = faulty()
    firsts = [env.reset(seed=seed)[0] for seed in range(starts)]
    for name, put in {"none": lambda seen: seen, **SEEN}.items():
        began = time.perf_counter()
        found = [trained.unlike(put(seen), robot) for seen in firsts]
        spent = 1000 * (time.perf_counter() - began) / starts
        words = next((one for one in found if one), [])
        print(f"{name}: {sum(map(bool, found))} of {starts}, {spent:.1f} ms; {'; '.join(words)}")


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--world", choices=list(WORLDS), default="lift")
    parser.add_argument("--lerobot", type=Path, help="of the world 'act': the policy's folder")
    parser.add_argument("--python", default="", help="of the world 'act': LeRobot's Python")
    parser.add_argument("--only", nargs="*", default=None, help="names of faults")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after so many")
    parser.add_argument(
        "--first", type=int, metavar="STARTS",
        help="instead: compare first observations alone, of so many starts (seconds)",
    )  # fmt: skip
    given = parser.parse_args()
    if given.first:
        compare_first(given.data, given.first)
        return
    given.output.mkdir(parents=True, exist_ok=True)
    file, began = given.output / "zero.jsonl", time.monotonic()
    lines = file.read_text().splitlines() if file.exists() else []
    found_before = map(json.loads, lines)
    done = {one["fault"] for one in found_before if one["verdict"] != "not run"}
    world = replace(WORLDS[given.world], lerobot=given.lerobot, python=given.python)
    if (given.world == "act") != (given.lerobot is not None):
        parser.error("--world act needs --lerobot FOLDER and --python FILE, and no other does")
    for fault in world.chosen(FAULTS):
        unwanted = given.only is not None and fault.name not in given.only
        if fault.name in done or unwanted or time.monotonic() - began > given.seconds:
            continue
        start, out = time.monotonic(), io.StringIO()
        with redirect_stdout(out):
            code = run_command(command(fault, world, given.data, given.output))
        shown = out.getvalue().strip().splitlines()
        found = json.loads(shown[-1]) if shown and code != 2 else {}
        verdict = judged(fault, found) if found else "not run"
        seconds = round(time.monotonic() - start, 1)
        line = {"fault": fault.name, "verdict": verdict, "code": code, "seconds": seconds, **found}
        print(
            f"{fault.name:32} {verdict:8} {seconds:6.1f} s  {found.get('sentence', '')}", flush=True
        )
        with file.open("a") as lines_out:
            lines_out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
