"""The worked changes of docs/extend/training.md, run as a lab would.

Their code is taken from the page.
"""

import ast
import dataclasses
import importlib
import json
import re

import numpy as np
import pytest
import torch
import train_worker
import train_worlds
from test_train_end_to_end import SCRIPT, launch

from dzrobot.envs import observation_space
from dzrobot.errors import (
    CheckpointError,
    ConfigError,
    ModalityError,
    StatisticsError,
    UnknownNameError,
)
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import LoadOptions, load_network
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training import Plugin
from dzrobot.training.data import LoaderPlan, build_loader
from dzrobot.training.data.sampler import Draws
from dzrobot.training.recipes.read import plan_recipe, read_recipe
from dzrobot.training.run.build import build
from dzrobot.training.run.plugin import Plugins, load_plugin
from dzrobot.training.run.trainer import Trainer


def trainer(solo, root, folder, *plugins, **changes):
    config = train_worlds.config(root, runner__output_dir=folder, **changes)
    return Trainer(build(config, solo, Plugins.of(config.runner.plugins, plugins)))


HAND = {"model__embodiment_tag": "lab:HAND"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_page_says_how_many_lines_each_change_takes():
    counts = [
        sum(bool(line.strip()) and not line.strip().startswith("#") for line in block.splitlines())
        for block in train_worlds.LAB
    ]
    told = re.findall(r"^\| .* \| (\d+) \|$", train_worlds.LAB_PAGE.read_text(), re.MULTILINE)
    assert list(map(int, told)) == counts
    for block in train_worlds.LAB:
        # Nothing that begins with an underscore is needed from this package.
        assert "dzrobot._" not in ast.unparse(ast.parse(block))


# A loss term.


def test_a_term_is_one_more_part_of_the_loss_however_the_batch_is_split(
    solo, train_root, lab, tmp_path
):
    from smooth import Smooth

    def first(*plugins, **changes):
        return train_worker.gradients(trainer(solo, train_root, tmp_path, *plugins, **changes))

    plain, none = first(), first(Smooth(weight=0.0))
    strong, whole = first(Smooth(weight=5.0)), first(Smooth(weight=5.0), runner__micro_batch_size=4)
    assert torch.equal(none[0][:2], plain[0])
    assert none[0][2] == 0
    for name, gradient in plain[1].items():
        assert torch.equal(none[1][name], gradient), name
    torch.testing.assert_close(strong[0], whole[0], rtol=1e-4, atol=0)
    assert strong[0][2] > 0.1
    assert torch.equal(strong[0][:2], plain[0])
    last = "action_decoder.layer2.W"
    torch.testing.assert_close(strong[1][last], whole[1][last], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(strong[1][last], plain[1][last], rtol=1e-2)


class Returns(Plugin):
    def __init__(self, term):
        self._term = term

    def losses(self):
        return {"odd": self._term}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("term", "said"),
    [
        (lambda p: p.action_BAM.mean(), r"'odd' returned .* shape \(\).*\(1,\)"),
        (lambda p: 0.5, "'odd' returned a float"),
        (torch.nn.Linear(2, 2), "'odd' has weights of its own"),
    ],
)
def test_a_term_that_would_not_add_up_is_refused(solo, train_root, tmp_path, term, said):
    with pytest.raises(ConfigError, match=said):
        train_worker.gradients(trainer(solo, train_root, tmp_path, Returns(term)))


# A sense of the robot's own.


def test_a_new_sense_changes_nothing_before_the_first_step(solo, touched, train_root, tmp_path):
    def first_loss(root, **changes):
        run = train_worker.trainer(solo, root, runner__output_dir=tmp_path / root.name, **changes)
        return train_worker.gradients(run)

    plain, hand = first_loss(train_root), first_loss(touched, **HAND)
    assert torch.equal(plain[0], hand[0])
    new = hand[1].keys() - plain[1].keys()
    assert {name.split(".")[1] for name in new} == {"touch"}
    assert hand[1]["conditions.touch.gate"].abs().max() > 0
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, hand[1][name]), name


@pytest.fixture(scope="session")
def felt(solo, touched, tmp_path_factory):
    """Return the folder of a short run with pads, exported, and the robot."""
    folder = tmp_path_factory.mktemp("felt")
    config = {"runner__max_steps": 4, "checkpoint__export": True, "optim__lr": 3e-2}
    trainer(solo, touched, folder, **HAND, **config).run()
    return folder, importlib.import_module("lab").HAND


def observation(robot, touch):
    seen, _ = train_worlds.frame(0, 3, np.random.default_rng(0), robot)
    return {**seen, "state.touch": np.full(96, touch, np.float32)}


def test_a_policy_feels_what_it_was_trained_with(felt):
    folder, hand = felt
    export = folder / "export" / "step_00000004"
    policy = DreamZeroPolicy.from_pretrained(export, embodiment="lab:HAND")
    plans = []
    for touch in (-0.9, 0.9):
        policy.reset("one", episode=0)
        plans.append(policy.infer(observation(hand, touch), session="one")["actions"])
    assert np.abs(plans[1] - plans[0]).max() > 1e-4
    space = observation_space(hand, {part.key: (-9.0, 9.0) for part in hand.state})
    assert space["state.touch"].shape == (96,)
    lacking = observation(hand, 0.0)
    del lacking["state.touch"]
    with pytest.raises(ModalityError, match=r"state\.touch missing"):
        policy.infer(lacking, session="one")


def test_a_checkpoint_with_a_sense_says_which_robot_it_needs(felt, touched, train_root):
    folder, hand = felt
    export = folder / "export" / "step_00000004"
    passport = json.loads((export / "dzrobot_passport.json").read_text())
    assert passport["embodiments"]["hand"]["conditions"] == ["state.touch by touch:Touch"]
    (said,) = passport["plugins"]
    assert (said["name"], len(said["source"])) == ("touch:Touch (state.touch)", 64)
    with pytest.raises(CheckpointError, match=r"embodiment='lab:HAND'.*--embodiment lab:HAND"):
        DreamZeroPolicy.from_pretrained(export)
    without = dataclasses.replace(hand, state=train_worlds.ROBOT.state)
    with pytest.raises(CheckpointError, match=r"encoders of its own: checkpoint state\.touch"):
        DreamZeroPolicy.from_pretrained(export, embodiment=without)
    (export / "dzrobot_passport.json").unlink()
    try:
        # As from a folder that lost it: the weights say it as well.
        with pytest.raises(CheckpointError, match=r"state\.touch.*module:NAME"):
            DreamZeroPolicy.from_pretrained(export, embodiment=without)
    finally:
        (export / "dzrobot_passport.json").write_text(json.dumps(passport))
    statistics = json.loads((touched / "metadata.json").read_text())
    assert len(statistics["hand"]["statistics"]["state"]["touch"]["min"]) == 96


def test_a_checkpoint_without_a_sense_cannot_act_with_it(train_root, lab):
    hand = dataclasses.replace(importlib.import_module("lab").HAND, tag=train_worlds.ROBOT.tag)
    with pytest.raises(StatisticsError, match=r"no 'touch', needed for state\.touch"):
        DreamZeroPolicy.from_pretrained(train_root / "tiny", embodiment=hand)
    # Whatever statistics lie beside them, the weights have no encoder.
    with pytest.raises(CheckpointError, match=r"was trained without state\.touch"):
        load_network(open_checkpoint(train_root / "tiny"), LoadOptions(conditions=hand.conditions))


def test_encoders_that_would_lose_numbers_are_refused(solo, touched, lab):
    (lab / "norms.py").write_text(
        "from dataclasses import replace\nimport lab\nfrom torch import nn\n"
        "def batch(dim, width): return nn.Sequential(nn.Linear(dim, width), nn.BatchNorm1d(1))\n"
        "def robot(encoder):\n"
        "    *arm, touch = lab.HAND.state\n"
        "    return replace(lab.HAND, state=(*arm, replace(touch, encoder=encoder)))\n"
        "BATCH, NONE, TEXT = map(robot, ('norms:batch', 'norms:none', 'builtins:max'))\n"
    )
    found = {"BATCH": "buffers", "NONE": "does not exist", "TEXT": "returned a int"}
    for name, said in found.items():
        changes = {"model__embodiment_tag": f"norms:{name}"}
        with pytest.raises((ConfigError, UnknownNameError), match=said):
            train_worker.trainer(solo, touched, **changes)


@pytest.mark.long
def test_adapters_leave_an_encoder_whole(solo, touched, lab, tmp_path):
    """Although its layers are called as those that get adapters."""
    (lab / "named.py").write_text(
        "from dataclasses import replace\nimport lab\nfrom torch import nn\n"
        "class Ffn(nn.Module):\n"
        "    def __init__(self, dim, width):\n"
        "        super().__init__()\n"
        "        self.ffn = nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, width))\n"
        "    def forward(self, x):\n        return self.ffn(x)\n"
        "*arm, touch = lab.HAND.state\n"
        "HAND = replace(lab.HAND, state=(*arm, replace(touch, encoder='named:Ffn')))\n"
    )
    changes = {
        "model__embodiment_tag": "named:HAND", "model__is_lora": True, "runner__max_steps": 1,
        "checkpoint__export": True,
    }  # fmt: skip
    run = trainer(solo, touched, tmp_path, **changes)
    own = {name for name in run.components.optimizer.named if name.startswith("conditions.")}
    layers = {
        f"conditions.touch.encoder.ffn.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")
    }
    assert own == {*layers, "conditions.touch.gate"}
    run.run()
    export = tmp_path / "export" / "step_00000001"
    policy = DreamZeroPolicy.from_pretrained(export, embodiment="named:HAND")
    assert policy.act(observation(importlib.import_module("named").HAND, 0.5)).shape == (7,)


# An own order of samples.


def drawn(data, parts, world_size, steps=range(3)):
    """Return the samples of each step, by slot, as ``world_size`` processes would read them."""
    found = {}
    for rank in range(world_size):
        plan = LoaderPlan(
            global_batch=4, micro_batch=parts, rank=rank, world_size=world_size,
            start_step=steps[0], stop_step=steps[-1] + 1,
        )  # fmt: skip
        for batch in build_loader(data.without_images(), plan):
            slots, ids = batch["slot"].tolist(), batch["sample_id"].tolist()
            found |= {(batch["step"], slot): n for slot, n in zip(slots, ids, strict=True)}
    return found


def test_a_sampler_gives_the_same_samples_to_any_number_of_processes(
    solo, train_root, lab, tmp_path
):
    from grasps import Grasps

    run = trainer(solo, train_root, tmp_path, Grasps(share=0.9))
    data = run.components.datasets.train
    alone = drawn(data, 1, 1)
    assert len(alone) == 12
    assert drawn(data, 2, 2) == alone
    assert drawn(data, 1, 1, range(1, 3)) == {k: v for k, v in alone.items() if k[0]}
    plain = trainer(solo, train_root, tmp_path).components.datasets.train
    assert drawn(plain, 1, 1) != alone

    def grasp(number):
        _, reader, window = data.locate(number)
        return np.ptp(np.sign(reader.vectors(window)["action.actions"][:, -1])) > 0

    many = np.arange(400)
    ids = [key.sample_id for key in data.sample_keys(0, many.tolist(), 400)]
    base = [key.sample_id for key in plain.sample_keys(0, many.tolist(), 400)]
    assert np.mean([grasp(n) for n in ids]) > 0.85 > np.mean([grasp(n) for n in base]) + 0.2


class Draws2(Plugin):
    def __init__(self, at):
        self._at = at

    def sampler(self, inputs):
        plugin = self

        class Own:
            def at(self, positions):
                return plugin._at(np.asarray(positions), [len(d) for d in inputs.datasets])

        return Own()


GENERATOR = np.random.default_rng(0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("at", "said"),
    [
        (lambda p, n: Draws(p * 0, GENERATOR.integers(n[0], size=len(p)), p * 0), "other windows"),
        (lambda p, n: Draws(p * 0, np.arange(len(p)) % n[0], p * 0), "other windows"),
        (lambda p, n: Draws(p * 0, p * 0 + n[0], p * 0), r"window \d+ of dataset 0, which has"),
        (lambda p, n: Draws(p * 0 + 7, p * 0, p * 0), "part below 1"),
        (lambda p, n: p, "Draws"),
    ],
)
def test_a_sampler_that_is_no_function_of_the_position_is_refused(solo, train_root, at, said):
    config = train_worlds.config(train_root)
    with pytest.raises(ConfigError, match=said):
        build(config, solo, Plugins.of((), [Draws2(at)]))


# Callbacks, and what is kept.


class Counting(Plugin):
    """Keeps a number and a tensor; draws on neither the clock nor the process."""

    def __init__(self, gain=2):
        self.gain = gain
        self.steps = 0
        self.total = torch.zeros(3)
        self._events = []

    def started(self, run):
        self._events.append(("started", run.rank, run.world_size))

    def stepped(self, run, step):
        self.steps += 1
        self.total += self.gain * step
        self._events.append(("stepped", step))

    def recorded(self, run, record):
        self._events.append(("recorded", record.step))
        return {"counted": float(self.steps)}

    def saved(self, run, folder):
        assert (folder / "meta.json").is_file()
        self._events.append(("saved", folder.name))

    def ended(self, run, *, finished):
        self._events.append(("ended", finished))


SHORT = {
    "checkpoint__save_interval": 1, "checkpoint__async_save": False, "runner__max_steps": 2,
}  # fmt: skip


def test_hooks_come_in_order_and_state_survives_a_resume(solo, train_root, tmp_path):
    straight = trainer(solo, train_root, tmp_path / "one", Counting(), **SHORT)
    straight.run()
    (whole,) = straight.components.plugins.all
    assert whole._events == [
        ("started", 0, 1), ("stepped", 1), ("saved", "step_00000001"), ("stepped", 2),
        ("recorded", 2), ("saved", "step_00000002"), ("ended", True),
    ]  # fmt: skip
    assert [row["counted"] for row in rows(tmp_path / "one") if "counted" in row] == [2.0]
    (tmp_path / "one" / "checkpoints" / "step_00000002").rename(tmp_path / "away")
    again = {"runner__resume_dir": "auto", **SHORT}
    resumed = trainer(solo, train_root, tmp_path / "one", Counting(), **again)
    resumed.run()
    (half,) = resumed.components.plugins.all
    assert (half.steps, half.total.tolist()) == (2, whole.total.tolist()) == (2, [6.0] * 3)
    assert train_worker.digest(resumed) == train_worker.digest(straight)
    for plugins in ((), (Counting(gain=3),)):
        other = trainer(solo, train_root, tmp_path / "one", *plugins, **again)
        with pytest.raises(CheckpointError, match=r"belongs to another run: plugins: .*Counting"):
            other.resume()


def test_what_cannot_be_kept_is_refused_before_anything_is_loaded():
    odd = Counting()
    odd.reader = object()
    with pytest.raises(ConfigError, match=r"'reader' is a object.*'_reader'"):
        Plugins.of((), [odd])
    with pytest.raises(ConfigError, match="more than once"):
        Plugins.of((), [Counting(), Counting()])


def test_plugins_are_named_as_robots_are(lab, monkeypatch):
    _, config = read_recipe(
        "tiny_cpu",
        ["plugin=smooth", "plugin=grasps:Grasps", "model.embodiment_tag=libero_mini",
         "model.model_path=x", "data.train_data_paths=x", "runner.output_dir=x",
         "runner.max_steps=1"],
    )  # fmt: skip
    assert config.runner.plugins == ("smooth", "grasps:Grasps")
    assert [type(load_plugin(name)).__name__ for name in config.runner.plugins] == [
        "Smooth", "Grasps",
    ]  # fmt: skip
    (lab / "both.py").write_text(
        "from dzrobot.training import Plugin\n"
        "class A(Plugin):\n    def __init__(self, x): self.x = x\n"
        "class B(Plugin): pass\nb = B()\nc = 3\n"
    )
    for name, said in (
        ("both", "holds 3 plug-ins. Write one of plugin=both:A, plugin=both:B"),
        ("both:A", "without arguments"),
        ("both:c", "is a int"),
        ("both:d", "does not exist"),
        ("nowhere", "no module 'nowhere'"),
        ("train_worlds", "holds 0 plug-ins"),
    ):
        with pytest.raises((UnknownNameError, ConfigError), match=said):
            load_plugin(name)


def test_a_plan_looks_for_plugins_as_training_does(lab, monkeypatch):
    monkeypatch.chdir(lab)
    for name, said in (
        ("smooth", None), ("grasps:Grasps", None), ("nowhere:At", "no module 'nowhere'"),
        ("not a name", "is not written module or module:Name"),
    ):  # fmt: skip
        words = [
            "model.embodiment_tag=libero_mini",
            "model.preset=5b",
            "runner.plugins=" + str([name]),
        ]
        if said is None:
            assert plan_recipe("tiny_cpu", words, 1).config.runner.plugins == (name,)
        else:
            with pytest.raises(ConfigError, match=said):
                plan_recipe("tiny_cpu", words, 1)


@pytest.mark.long
def test_torchrun_takes_plugins_by_name(lab, touched, train_environment, tmp_path):
    words = [
        "tiny_cpu", f"model.model_path={touched / 'tiny'}", "model.embodiment_tag=lab:HAND",
        f"model.metadata_json_path={touched / 'metadata.json'}",
        f"data.train_data_paths={touched / 'dataset'}", f"runner.output_dir={tmp_path / 'run'}",
        "runner.max_steps=2", "runner.micro_batch_size=1", "runner.global_batch_size=2",
        "runner.own_rows=3", "logging.tensorboard=false", "logging.log_interval=1", "plugin=smooth",
        "plugin=grasps:Grasps", "plugin=keep",
    ]  # fmt: skip
    launch(SCRIPT, train_environment, lab, *words)
    assert all(row["loss_smooth"] >= 0 for row in rows(tmp_path / "run") if "loss" in row)
    assert (lab / "kept" / "step_00000002" / "meta.json").is_file()
    passport = json.loads((tmp_path / "run/export/step_00000002/dzrobot_passport.json").read_text())
    assert [one["name"] for one in passport["plugins"]] == [
        "smooth:Smooth", "grasps:Grasps", "keep:Keep", "touch:Touch (state.touch)",
    ]  # fmt: skip
