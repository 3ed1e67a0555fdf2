"""Runs the plug-in with LeRobot's own code, in its Python: ``dreamzero_plugin.py ACTION ...``.

What each action finds is printed as one line of JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.scripts import lerobot_train
from lerobot.utils.import_utils import register_third_party_plugins

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.network.prompt import PromptTokenizer
from dzrobot.policies.dreamzero.network.world_action import LossOptions
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.data import ReaderOptions, SampleKey, SourceSpec, TrainingData, collate
from dzrobot.training.data.provenance import PROVENANCE
from dzrobot.training.run.inputs import NetworkInputs, PromptEncoder, sample_noise

ROBOT = load_embodiment("libero_mini")
TASK = "Lift the red cube"
STEPS = 15


def say(**found):
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def opened(folder, *overrides):
    config = PreTrainedConfig.from_pretrained(folder, cli_overrides=list(overrides))
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    before, after = make_pre_post_processors(
        config, pretrained_path=folder,
        preprocessor_overrides={"device_processor": {"device": "cpu"}},
    )  # fmt: skip
    return policy, before, after


def listed():
    """Say what LeRobot finds by itself."""
    from lerobot.envs import EnvConfig

    say(
        policies=sorted(PreTrainedConfig.get_known_choices()),
        environments=sorted(EnvConfig.get_known_choices()),
    )


def again(folder, target, *overrides):
    """Load with LeRobot's functions, and save with them."""
    for part in opened(folder, *overrides):
        part.save_pretrained(target)
    say(same=[c.checkpoint for c in map(PreTrainedConfig.from_pretrained, (folder, target))])


def marks(root):
    """Say which rows a person is marked to have acted in, as LeRobot reads them."""
    dataset = LeRobotDataset("us/marked", root=root)
    say(marks=[bool(row["intervention"]) for row in dataset])


def observations(environments, draws):
    """Yield what each of some environments shows, in dzrobot's keys."""
    for _ in range(STEPS):
        yield [
            {
                **{view.key: draws.integers(0, 256, (*view.resolution, 3), np.uint8)
                   for view in ROBOT.views},
                "state.state": draws.uniform(-0.5, 1, 8).astype(np.float32),
                ROBOT.language: TASK,
            }
            for _ in range(environments)
        ]  # fmt: skip


def as_lerobot(seen):
    """Return observations as ``lerobot_eval`` hands them to the processors."""
    batch = {"task": [one[ROBOT.language] for one in seen]}
    for view in ROBOT.views:
        images = torch.from_numpy(np.stack([one[view.key] for one in seen]))
        batch[view.feature] = images.permute(0, 3, 1, 2).contiguous().float() / 255
    batch["observation.state"] = torch.from_numpy(np.stack([one["state.state"] for one in seen]))
    return batch


def play(folder, checkpoint):
    """Compare every action, plan and imagined video with dzrobot's own policy."""
    found = {}
    cases = {"fixed": (1, "fixed"), "keyed": (1, "keyed"), "two": (2, "keyed")}
    for name, (environments, noise) in cases.items():
        words = [f"--noise={noise}", "--save_predicted_video=true", "--noise_seed=7"]
        policy, before, after = opened(folder, *words)
        own = DreamZeroPolicy.from_pretrained(
            checkpoint, options=PolicyOptions(noise=noise, seed=7)
        )
        sessions = [str(number) for number in range(environments)]
        actions, videos, plans = [], [], []
        for episode in range(2):
            policy.reset()
            for number, session in enumerate(sessions):
                own.reset(session, episode=environments * episode + number)
            for seen in observations(environments, np.random.default_rng(episode)):
                with torch.inference_mode():
                    action = after(policy.select_action(before(as_lerobot(seen))))
                actions.append(np.array_equal(action.numpy(), own.act_batch(seen, sessions)))
                if policy.last_predicted_latents is not None:
                    frames = policy.decode_predicted_latents(policy.last_predicted_latents)
                    imagined = np.concatenate([own.imagine(s) for s in sessions], axis=2)
                    videos.append(np.array_equal(frames.numpy(), imagined))
                    policy.last_predicted_latents = None
        policy.reset()
        for number, session in enumerate(sessions):
            own.reset(session, episode=2 * environments + number)
        for seen in list(observations(environments, np.random.default_rng(9)))[:3]:
            with torch.inference_mode():
                chunk = policy.predict_action_chunk(before(as_lerobot(seen)))
            wanted = [plan["actions"] for plan in own.infer_batch(seen, sessions)]
            plans.append(np.array_equal(chunk.numpy(), wanted))
        found[name] = [actions, videos, plans]
    say(**found)


def record(root):
    """Write a dataset with LeRobot's own writer: images, so that no codec is in between."""
    draws = np.random.default_rng(0)
    features = {
        view.feature: {"dtype": "image", "shape": (*view.resolution, 3),
                       "names": ["height", "width", "channel"]}
        for view in ROBOT.views
    }  # fmt: skip
    features["observation.state"] = {"dtype": "float32", "shape": (8,), "names": None}
    features["action"] = {"dtype": "float32", "shape": (7,), "names": None}
    dataset = LeRobotDataset.create("local/plug", 20, features, root=root, use_videos=False)
    for length in (21, 24):
        for _ in range(length):
            images = {view.feature: draws.integers(0, 256, (*view.resolution, 3), np.uint8)
                      for view in ROBOT.views}  # fmt: skip
            dataset.add_frame(
                {
                    **images, "task": TASK,
                    "observation.state": draws.uniform(-0.2, 1, 8).astype(np.float32),
                    "action": draws.uniform(-1, 1, 7).astype(np.float32),
                }
            )  # fmt: skip
        dataset.save_episode()
    dataset.finalize()


class OwnLoss:
    """dzrobot's training loss of the samples that LeRobot chose, with the same noise."""

    def __init__(self, policy, root):
        # Without the note which recordings they were made from, as of a published checkpoint.
        metadata = {
            tag: {name: value for name, value in entry.items() if name != PROVENANCE}
            for tag, entry in policy._checkpoint.metadata.items()
        }
        robot = policy.config.robot
        spec = SourceSpec(paths=(root,), embodiment=robot, metadata=metadata)
        self.data = TrainingData.open([spec], seed=0, options=ReaderOptions())
        (reader,) = self.data.sources[0].readers
        offsets = reader.catalog.episodes.offset
        self.windows = {}
        for number in range(len(reader)):
            ordinal, start = reader.windows.locate(number)
            self.windows[int(offsets[ordinal]) + start] = number
        tokenizer = PromptTokenizer(
            policy._checkpoint.folder / "tokenizer", text_len=policy.network.config.dit.text_len
        )
        self.inputs = NetworkInputs(
            model=policy.network, prompts=PromptEncoder(policy.network, tokenizer), data=self.data,
            device=torch.device("cpu"),
        )  # fmt: skip

    def __call__(self, network, indices, step):
        keys = [SampleKey(0, slot, self.windows[i]) for slot, i in enumerate(indices)]
        prepared = self.inputs.prepare(collate([self.data[key] for key in keys]))
        noise = sample_noise(network.config, prepared, 0, step, range(len(keys)))
        with torch.no_grad():
            return float(network.loss(prepared, noise, options=LossOptions()).loss)


def train(root, first, *words):
    """Run ``lerobot-train`` from a step on; say the samples of each, its loss, and dzrobot's."""
    first = int(first)
    kind = get_policy_class("dreamzero")
    forward, steps, own = kind.forward, [], []

    def recorded(policy, batch):
        indices = batch["index"].tolist()
        if not own:
            own.append(OwnLoss(policy, root))
        wanted = own[0](policy.network, indices, first + len(steps))
        loss, parts = forward(policy, batch)
        steps.append([indices, loss.item(), wanted])
        return loss, parts

    kind.forward = recorded
    sys.argv = ["lerobot-train", *words]
    lerobot_train.main()
    say(steps=steps, windows=len(own[0].windows))


if __name__ == "__main__":
    actions = {one.__name__: one for one in (listed, again, marks, play, record, train)}
    # As LeRobot's own programs do at their start.
    register_third_party_plugins()
    actions[sys.argv[1]](*[Path(w) if w.startswith("/") else w for w in sys.argv[2:]])
