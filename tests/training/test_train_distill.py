"""Distillation to fewer solver steps: what a run learns, resumes, exports, and refuses."""

import json
import shutil

import numpy as np
import pytest
import torch
import train_worker
import train_worlds
from torch.distributed.tensor import DTensor

from dzrobot.configuration import load_config
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.directory import METADATA_FILE, open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.passport import PASSPORT_FILE
from dzrobot.policies.dreamzero.options import PolicyOptions
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
from dzrobot.training.cost.flops import sample_cost
from dzrobot.training.cost.plan import describe_plan, plan_run, settle
from dzrobot.training.recipes.check import find_faults
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.run.build import build
from dzrobot.training.run.export import export
from dzrobot.training.run.trainer import Trainer
from dzrobot.training.sft_config import SFTConfig

STEPS = 2


def config(root, folder, distill, **changes):
    values = train_worlds.recipe(
        root, runner__output_dir=folder, runner__max_steps=STEPS, checkpoint__save_interval=1,
        optim__lr_warmup_steps=0, optim__lr=0.003, **{"model__metadata_json_path": None, **changes},
    )  # fmt: skip
    return load_config(SFTConfig, {**values, "distill": distill})


def trainer(solo, root, folder, distill=None, **changes):
    distill = distill or {"from_steps": 4, "to_steps": 2}
    return Trainer(build(config(root, folder, distill, **changes), solo))


@pytest.fixture(scope="module")
def run(train_root, solo, tmp_path_factory):
    """Return folder, export and digest of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("distilled") / "run"
    run = trainer(solo, train_root, folder)
    run.run()
    return folder, export(run.components, STEPS), train_worker.digest(run)


def test_the_teacher_stays_and_the_student_moves(train_root, solo, tmp_path):
    run = trainer(solo, train_root, tmp_path / "run")
    teacher, student = run.components.teacher.teacher, run.components.model.model
    assert not any(p.requires_grad for p in teacher.parameters())

    def weights(network):
        return [
            p.full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone()
            for p in network.parameters()
        ]

    before = weights(teacher)
    assert all(map(torch.equal, before, weights(student)))
    run.train_step(run.batches(1))
    assert all(map(torch.equal, before, weights(teacher)))
    assert not all(map(torch.equal, before, weights(student)))


@pytest.mark.long
def test_interrupted_and_resumed_is_uninterrupted(run, train_root, solo, tmp_path):
    folder = tmp_path / "run"
    first = trainer(solo, train_root, folder)
    batches = first.batches(STEPS)
    first.train_step(batches)
    first.step += 1
    first.save(wait=True)
    second = trainer(solo, train_root, folder, runner__resume_dir="auto")
    second.run()
    assert (second.step, train_worker.digest(second)) == (STEPS, run[2])


@pytest.mark.sampled
@pytest.mark.parametrize("distill", [{"from_steps": 8, "to_steps": 2}, {"to_steps": None}])
def test_a_run_is_resumed_with_its_own_steps_alone(run, train_root, solo, distill):
    other = trainer(solo, train_root, run[0], distill, runner__resume_dir="auto")
    with pytest.raises(CheckpointError, match="distilled: checkpoint 4 to 2 steps of"):
        other.resume()


def test_a_checkpoint_says_what_it_was_distilled_for_and_acts_so(run, train_root):
    for place in (run[1], run[0] / f"checkpoints/step_{STEPS:08d}"):
        assert json.loads((place / PASSPORT_FILE).read_text())["distilled_steps"] == 2
        policy = DreamZeroPolicy.from_pretrained(place, embodiment=train_worlds.ROBOT)
        evaluated = []
        first = policy._network.model.blocks[0]
        first.register_forward_hook(lambda *_, evaluated=evaluated: evaluated.append(1))
        policy.act(train_worlds.frame(0, 3, np.random.default_rng(0))[0])
        # One more evaluation reads the first frame.
        assert len(evaluated) == 1 + 2
        assert {name: policy.card[name] for name in ("dit_steps", "solver_steps", "solver")} == {
            "dit_steps": 2, "solver_steps": 2, "solver": "euler",
        }  # fmt: skip
    assert "| solver steps, distilled | 2 |" in (run[1] / "README.md").read_text()
    usual = DreamZeroPolicy.from_pretrained(train_root / "tiny", embodiment=train_worlds.ROBOT)
    # Results from before there were other solvers are continued.
    assert (usual.options.solver_steps, usual.options.solver) == (16, "unipc")
    assert not {"solver", "solver_steps"} & usual.card.keys()


@pytest.mark.parametrize("options", [{"dit_steps": 8}, {"solver_steps": 16}, {"solver": "unipc"}])
def test_other_steps_than_its_own_are_refused(run, options):
    with pytest.raises(ConfigError, match="was distilled for 2 solver steps"):
        DreamZeroPolicy.from_pretrained(
            run[1], embodiment=train_worlds.ROBOT, options=PolicyOptions(**options)
        )


def test_a_distilled_teacher_takes_its_own_steps(run, train_root, solo, tmp_path):
    student = {"model__model_path": str(run[1])}
    with pytest.raises(CheckpointError, match=r"from_steps=4, .* distilled for 2 solver steps"):
        trainer(solo, train_root, tmp_path / "a", **student)
    again = trainer(solo, train_root, tmp_path / "b", {"from_steps": 2, "to_steps": 1}, **student)
    again.train_step(again.batches(1))
    # Without distillation it is an ordinary network again.
    plain = trainer(solo, train_root, tmp_path / "c", {"to_steps": None}, **student)
    assert json.loads(_sidecar(plain, tmp_path))["distilled_steps"] is None


def _sidecar(run, folder):
    run._sidecars.write(folder)
    return (folder / PASSPORT_FILE).read_text()


def test_another_teacher_has_to_see_the_same(train_root, solo, tmp_path):
    distill = {"from_steps": 4, "to_steps": 2, "teacher_path": str(train_root / "tiny")}
    other = train_worlds.checkpoint(tmp_path / "other", variant="14b")
    trainer(solo, train_root, tmp_path / "a", distill)
    with pytest.raises(CheckpointError, match="has other encoders"):
        trainer(solo, train_root, tmp_path / "b", {**distill, "teacher_path": str(other)})


def test_the_teachers_statistics_are_the_students(train_root, solo, tmp_path):
    own = {"model__metadata_json_path": train_root / "metadata.json"}
    with pytest.raises(CheckpointError, match=r"other statistics of libero_sim .* leave"):
        trainer(solo, train_root, tmp_path / "run", **own)


def test_recordings_may_be_others_than_the_teachers(train_root, solo, tmp_path):
    teacher = shutil.copytree(train_root / "tiny", tmp_path / "teacher")
    shutil.copy(train_root / "metadata.json", teacher / METADATA_FILE)
    later = train_worlds.record(tmp_path / "later", episodes=2)
    changes = {"model__model_path": teacher, "data__train_data_paths": [str(later)]}
    run = trainer(solo, train_root, tmp_path / "run", **changes)
    run.train_step(run.batches(1))
    (source,) = run.components.datasets.train.sources
    measured = Statistics.from_metadata(train_root / "metadata.json", train_worlds.ROBOT)
    assert source.pipeline.statistics.fingerprint == measured.fingerprint


@pytest.mark.parametrize(
    ("distill", "field", "phrase"),
    [
        ({"from_steps": 6, "to_steps": 4}, "distill.from_steps", "the next ones: 8, 12"),
        ({"from_steps": 4, "to_steps": 4}, "distill.from_steps", "the next ones: 8, 12"),
        ({"teacher_path": "a/b"}, "distill.to_steps", "how many solver steps"),
        (
            {"to_steps": 4, "teacher_path": "/nowhere/teacher"},
            "distill.teacher_path", "/nowhere/teacher does not exist",
        ),
    ],
)  # fmt: skip
def test_impossible_distillations_are_named(train_root, tmp_path, distill, field, phrase):
    found = {f.field: f.message for f in find_faults(config(train_root, tmp_path, distill), 1)}
    assert phrase in found[field]


def test_a_teacher_plans_with_its_video(train_root, tmp_path):
    own = config(train_root, tmp_path, {"to_steps": 4}, model__action_only_ratio=0.5)
    found = {f.field: f.message for f in find_faults(own, 1)}
    assert "a teacher plans with its video" in found["model.action_only_ratio"]


def test_a_plan_counts_the_teacher(train_root, tmp_path):
    base = open_checkpoint(train_root / "tiny").config
    plain, taught = (
        config(train_root, tmp_path, {"from_steps": 4, "to_steps": steps}) for steps in (None, 2)
    )
    costs = [sample_cost(one, base, train_worlds.ROBOT.image_size, 9) for one in (plain, taught)]
    more = costs[1].executed - costs[0].executed
    assert more == pytest.approx(2 * costs[0].executed_forward)
    # What a plan describes is settled first: here, how gradients are added up.
    plans = [plan_run(settle(one, base, 1, 2**40), base, 1) for one in (plain, taught)]
    items = [{item.name: item.bytes_ for item in plan.memory.items} for plan in plans]
    # In float32, as the recipe computes.
    assert items[1]["teacher's weights"] == 4 * plans[0].counts.trained
    assert plans[1].memory.peak > plans[0].memory.peak
    assert "teacher's weights" in describe_plan(plans[1])


@pytest.mark.long
def test_the_recipe_runs_and_resumes_with_the_same_words(train_root, solo, tmp_path):
    words = [
        f"model.model_path={train_root / 'tiny'}", "model.embodiment_tag=train_worlds:ROBOT",
        "data.num_workers=0",
        f"data.train_data_paths={train_root / 'dataset'}", f"runner.output_dir={tmp_path / 'run'}",
        "runner.max_steps=1", "optim.lr_warmup_steps=0", "runner.micro_batch_size=2",
        "runner.global_batch_size=2", "runner.own_rows=0", "logging.tensorboard=false",
    ]  # fmt: skip
    for _ in range(2):
        assert Trainer(build(load_recipe("distill_tiny_cpu", words, 1), solo)).run()
    passport = tmp_path / f"run/export/step_{1:08d}" / PASSPORT_FILE
    assert json.loads(passport.read_text())["distilled_steps"] == 4
