"""LIBERO in LeRobot's own evaluation loop and in ours: processor time of the same episodes.

    LEROBOT/0.6.1/bin/python benchmarks/lerobot_loop.py --task 0 --episodes 3

LEROBOT is the folder of ``make lerobot``; ``dzrobot libero setup`` must have been run by the same
Python. Both loops run one checkpoint, LeRobot's by the plug-in, on one thread, see 128 x 128 pixels
and make no films. Seconds of the whole program are counted, user and system, its start, loading and
opening the task included.

What LeRobot's loop did is compared with the actions of ours, and then played in
``dzrobot/SUITE-v0`` from the same starts: the same actions must succeed at the same step.

LeRobot turns quaternions into rotation vectors in float32, LIBERO's own datasets and dzrobot in
float64: states differ by 7e-9, and so do actions. With ``--float64`` LeRobot's loop does as ours.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

THEIRS, PLAYED, FLOAT64 = "--theirs", "--played", "--float64"
RENAMED = json.dumps({"observation.images.image2": "observation.images.wrist_image"})


def theirs(log: Path, words: list[str]) -> None:
    """Run ``lerobot-eval``; keep the actions of every episode and where it succeeded."""
    from dzrobot.envs.libero.assets import import_libero

    # LIBERO with its assets: by itself it would ask where they are.
    import_libero()
    from lerobot.envs import libero
    from lerobot.processor import env_processor
    from lerobot.scripts import lerobot_eval

    episodes: list[dict[str, Any]] = []
    reset, step = libero.LiberoEnv.reset, libero.LiberoEnv.step

    def begin(env: Any, **how: Any) -> Any:
        episodes.append({"start": env.init_state_id, "actions": [], "succeeded": False})
        return reset(env, **how)

    def act(env: Any, action: Any) -> Any:
        outcome = step(env, action)
        episodes[-1]["actions"].append([float(number) for number in action])
        episodes[-1]["succeeded"] = bool(outcome[4]["is_success"])
        return outcome

    libero.LiberoEnv.reset, libero.LiberoEnv.step = begin, act
    if FLOAT64 in words:
        words.remove(FLOAT64)
        env_processor.LiberoProcessorStep._quat2axisangle = _rotation_vectors
    sys.argv[1:] = words
    lerobot_eval.main()
    log.write_text(json.dumps([one for one in episodes if one["actions"]]), encoding="utf-8")


def _rotation_vectors(_: Any, quaternions: Any) -> Any:
    import torch
    from robosuite.utils.transform_utils import quat2axisangle

    rows = [quat2axisangle(one) for one in quaternions.double().numpy()]
    return torch.from_numpy(np.stack(rows))


def played(log: Path, suite: str, task: int) -> None:
    """Play kept actions in our environment; print whether each episode ends alike."""
    import gymnasium as gym

    import dzrobot  # noqa: F401  # registers the environments

    env = gym.make(f"dzrobot/{suite}-v0", task_id=task, resolution=128)
    for episode in json.loads(log.read_text(encoding="utf-8")):
        env.reset(seed=0, options={"init_state_id": episode["start"]})
        done, steps = False, 0
        for action in episode["actions"]:
            *_, info = env.step(np.array(action, np.float32))
            done, steps = bool(info["is_success"]), steps + 1
            if done:
                break
        same = done == episode["succeeded"] and steps == len(episode["actions"])
        sys.stdout.write(
            f"start {episode['start']}: LeRobot {'succeeded' if episode['succeeded'] else 'failed'}"
            f" after {len(episode['actions'])} steps, the same actions here: "
            f"{'the same' if same else f'success {done} after {steps}'}\n"
        )
    env.close()


def seconds(words: list[str], folder: Path) -> float:
    """Run a program; return the seconds of processor time that it and its children took."""
    before = os.times()
    with (folder / "log.txt").open("ab") as log:
        code = subprocess.run(words, stdout=log, stderr=log, check=False).returncode
    after = os.times()
    if code:
        sys.stderr.write((folder / "log.txt").read_text(errors="replace")[-4000:])
        sys.exit(f"{' '.join(words[:4])} ended with {code}")
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Compare the two loops."""
    if sys.argv[1:2] == [THEIRS]:
        return theirs(Path(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == [PLAYED]:
        return played(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bundled = Path(__file__).parents[1] / "policies/dreamzero/bundled/libero_object"
    parser.add_argument("--checkpoint", type=Path, default=bundled)
    parser.add_argument("--suite", default="libero_object")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument(FLOAT64, action="store_true", help="LeRobot's states as they are here")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory() as made:
        compare(options, Path(made))
    return None


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Run both programs, then the actions of one in the other's environment; print what was found.

    Args:
        options: Of the command line.
        folder: For what the programs write.
    """
    own = [sys.executable, "-m", "dzrobot"]
    seconds([*own, "convert", str(options.checkpoint), str(folder / "policy"), "--to", "lerobot"],
            folder)  # fmt: skip
    log = folder / "actions.json"
    there = seconds(
        [sys.executable, __file__, THEIRS, str(log), f"--policy.path={folder / 'policy'}",
         "--env.type=libero", f"--env.task={options.suite}", f"--env.task_ids=[{options.task}]",
         "--env.observation_height=128", "--env.observation_width=128", f"--rename_map={RENAMED}",
         f"--eval.n_episodes={options.episodes}", "--eval.batch_size=1", "--policy.device=cpu",
         f"--output_dir={folder / 'theirs'}", *([FLOAT64] if options.float64 else [])],
        folder,
    )  # fmt: skip
    here = seconds(
        [*own, "eval", "--checkpoint", str(options.checkpoint), "--suite", options.suite,
         "--tasks", str(options.task), "--episodes", str(options.episodes), "--workers", "0",
         "--device", "cpu", "--noise", "fixed", "--videos", "none", "--output",
         str(folder / "ours")],
        folder,
    )  # fmt: skip
    lines = (folder / "ours" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    ours = sorted((json.loads(line) for line in lines), key=lambda one: one["episode"])
    episodes = json.loads(log.read_text(encoding="utf-8"))
    hashes = [
        hashlib.sha256(np.array(one["actions"], np.float32).tobytes()).hexdigest()
        for one in episodes
    ]
    equal = sum(one["action_sha256"] == other for one, other in zip(ours, hashes, strict=True))
    sys.stdout.write(
        f"lerobot-eval: {there:.1f} s, {sum(one['succeeded'] for one in episodes)} of "
        f"{len(episodes)} succeeded, {sum(len(one['actions']) for one in episodes)} steps\n"
        f"dzrobot eval: {here:.1f} s, {sum(bool(one['success']) for one in ours)} of {len(ours)} "
        f"succeeded, {sum(one['steps'] for one in ours)} steps\n"
        f"ratio {here / there:.2f}; all actions equal in {equal} of {len(ours)} episodes\n"
    )
    sys.stdout.flush()
    subprocess.run(
        [sys.executable, __file__, PLAYED, str(log), options.suite, str(options.task)], check=True
    )


if __name__ == "__main__":
    main()
