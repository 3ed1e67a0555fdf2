"""What ``dzrobot train`` and ``dzrobot init`` are given: a run, or one message before it."""

import json
import shutil
from itertools import islice, product

import pytest
import torch
import train_worlds
from harness import HEAVY, assert_refused, mutations, refuses, whole_mutations
from test_fuzz_commands import PLACES, WHOLE
from test_train_damaged import hostile_description

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.checksums import write_checksums
from dzrobot.training.recipes.read import load_recipe
from dzrobot.training.sft_config import SFTConfig
from dzrobot.training.tiny.autoencoder import FitCheckpoint
from dzrobot.training.tiny.fit_plan import AutoencoderPlan
from dzrobot.training.tiny.init import FittedTo, write_fitted_checkpoint

run = HEAVY.run
ROBOT = train_worlds.ROBOT
TEXTS = (
    "", " ", "²", "nan", ".inf", "1e999", "-1", "0", "9" * 400, "true", "null", "[1]", "[[a]]",
    "{a: 1}", "../../x", "/x/" + "y" * 300, "nobody:X", "os:path", '"\\0"', "1_0",
)  # fmt: skip
FIELDS = [
    f"{section}.{name}"
    for section, field in SFTConfig.model_fields.items()
    for name in field.annotation.model_fields
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with recordings, statistics, a checkpoint and a recipe of one step."""
    folder = train_worlds.fill(tmp_path_factory.mktemp("world") / "world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DZROBOT_CACHE", str(folder / "cache"))
        values = train_worlds.recipe(
            folder, runner__max_steps=1, optim__lr_warmup_steps=0, checkpoint__save_interval=1
        )
        (folder / "recipe.yaml").write_text(json.dumps(values))
        yield folder


@pytest.fixture(scope="module")
def good(world):
    """Return what that step costs; its checkpoint stays in ``run``."""
    result = run(["train", world / "recipe.yaml"])
    assert result.code == 0, result.output
    return result


def test_every_field_given_every_text(world):
    """On the command line, up to where torch would be loaded."""
    recipe, refused, tried = str(world / "recipe.yaml"), 0, 0
    # Seven is no divisor of the number of texts: every field and every text has its turn.
    for name, text in islice(product(FIELDS, TEXTS), 0, None, 7):
        message = refuses(lambda name=name, text=text: load_recipe(recipe, [f"{name}={text}"], 1))
        tried += 1
        refused += message is not None
    assert tried > 180
    assert refused > tried * 2 / 3


@pytest.mark.parametrize("name", ["metadata.json", "tiny/config.json", "dataset/meta/info.json"])
def test_documents_that_a_recipe_names(world, name):
    path = world / name
    whole = path.read_bytes()
    document = json.loads(whole)
    shallow = [(key,) for key in document]
    cases = [*islice(mutations(document, only=shallow), 0, None, 14), *whole_mutations(whole)]
    refused = 0
    try:
        for _, content in cases:
            path.write_bytes(content)
            refused += refuses(lambda: load_recipe(str(world / "recipe.yaml"), [], 1)) is not None
    finally:
        path.write_bytes(whole)
    assert refused > 15


def corrupted_weights(world, folder):
    copy = shutil.copytree(world / "tiny", folder / "tiny")
    file = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return copy


def corrupted_recording(world, folder):
    copy = shutil.copytree(world / "dataset", folder / "dataset")
    file = max((copy / "data").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-9])
    return copy


CANNOT_BEGIN = {
    "output is a file": lambda world, _: f"runner.output_dir={world / 'metadata.json'}",
    "output below a file": lambda world, _: f"runner.output_dir={world / 'metadata.json' / 'x'}",
    "output of nobody": lambda world, _: "runner.output_dir=/proc/x/y",
    "resume a file": lambda world, _: f"runner.resume_dir={world / 'metadata.json'}",
    "resume nothing": lambda world, _: f"runner.resume_dir={world / 'nowhere'}",
    "resume a policy": lambda world, _: f"runner.resume_dir={world / 'tiny'}",
    "data is a file": lambda world, _: f"data.train_data_paths={world / 'metadata.json'}",
    "data is empty": lambda world, folder: f"data.train_data_paths={folder}",
    "statistics are a folder": lambda world, _: f"model.metadata_json_path={world}",
    "torn weights": lambda world, folder: f"model.model_path={corrupted_weights(world, folder)}",
    "torn data": lambda world, folder: (
        f"data.train_data_paths={corrupted_recording(world, folder)}"
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("what", CANNOT_BEGIN)
def test_a_run_that_cannot_begin(world, good, tmp_path, what):
    words = [CANNOT_BEGIN[what](world, tmp_path), f"runner.output_dir={tmp_path / 'run'}"]
    words = words[:1] if what.startswith("output") else words
    assert_refused(run(["train", world / "recipe.yaml", *words]), good)


def hostile(step):
    hostile_description(step, step.parent / "owned")
    write_checksums(step)


RESUMED = {
    "hostile": hostile,
    "meta null": lambda step: (step / "meta.json").write_text("null"),
    "no checksums": lambda step: (step / "SHA256SUMS").unlink(),
}


@pytest.mark.sampled
@pytest.mark.parametrize("what", RESUMED)
def test_a_checkpoint_that_cannot_be_gone_on_with(world, good, tmp_path, what):
    assert good.code == 0
    step = shutil.copytree(world / "run/checkpoints/step_00000001", tmp_path / "step_00000001")
    RESUMED[what](step)
    words = [f"runner.resume_dir={step}", f"runner.output_dir={tmp_path / 'run'}"]
    assert_refused(run(["train", world / "recipe.yaml", "runner.max_steps=2", *words]), good)
    assert not (tmp_path / "owned").exists()


def initial(world, output, **changes):
    flags = {
        "dataset": world / "dataset", "metadata": world / "metadata.json", "still-steps": 3,
        "clip-steps": 3, "embodiment": "train_worlds:ROBOT", **changes,
    }  # fmt: skip
    return ["init", output, *(f"--{name}={value}" for name, value in flags.items())]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("still-steps", (*WHOLE, "0", "99999999999")),
        ("clip-steps", (*WHOLE[::4], *WHOLE[1::4], "0")),
        ("seed", (*WHOLE[2::4], "4294967296")),
        ("num-workers", (*WHOLE[3::4], "99999999999")),
        ("embodiment", ("", "nobody", "nobody:X", "os:path", "libero_sim:x", "oxe_droid")),
        ("dataset", PLACES),
        ("metadata", PLACES),
    ],
)
def test_values_of_init(world, good, some, flag, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in some(values):
        assert_refused(run(initial(world, "made", **{flag: value})), good)
        assert not list(tmp_path.iterdir()), f"--{flag} {value!r} left something"


def test_places_that_init_cannot_make(world, good, some, tmp_path):
    places = (*PLACES[1:-1], world / "metadata.json", world / "metadata.json" / "x", world)
    for place in some(places):
        assert_refused(run(initial(world, place)), good)


SHORT = AutoencoderPlan(still_steps=3, clip_steps=3, clip_batch=1)


def test_statistics_that_are_none(world, tmp_path):
    path = tmp_path / "metadata.json"
    for kind, content in whole_mutations((world / "metadata.json").read_bytes()):
        if kind == "byte order mark":
            continue  # It is read.
        path.write_bytes(content)
        assert refuses(
            lambda: write_fitted_checkpoint(
                tmp_path / "made",
                FittedTo(embodiment=ROBOT, datasets=[world / "dataset"], metadata=path),
                SHORT,
            )
        ), kind
    assert [file.name for file in tmp_path.iterdir()] == ["metadata.json"]


KEPT = {
    "identity": (None, [], "x", {"steps": 4}, {1: "4"}),
    "results": (None, {"autoencoder": "x"}, {"autoencoder": None}, 3),
    "part": (None, 5, ["autoencoder"]),
    "step": (None, -1, "x", 0.5, True, [1]),
    "module": (None, {}, {"x": torch.zeros(1)}, {"weight": torch.zeros(9)}, {"weight": 5}, [1]),
    "others": (None, [], [1], [{}], [{"state": 5, "param_groups": 5}], "x"),
    "surplus": (1,),
}


def kept(path):
    """Keep a fit that was stopped; return what puts it back."""
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    FitCheckpoint(path, {"steps": "4"}, every=1).keep("autoencoder", 1, module, optimizer)
    return lambda: FitCheckpoint(path, {"steps": "4"}).restore("autoencoder", module, optimizer)


def test_a_stopped_fit_somebody_else_has_had_a_hand_in(tmp_path):
    path = tmp_path / "made.unfinished"
    restore = kept(path)
    assert restore() == 1
    whole, content = path.read_bytes(), torch.load(path, weights_only=True)
    for name, values in KEPT.items():
        for value in (*values, "missing"):
            corrupted = {key: old for key, old in content.items() if key != name}
            torch.save(corrupted if value == "missing" else {**corrupted, name: value}, path)
            message = refuses(restore)
            assert message or (name, value) in {("surplus", "missing"), ("part", "missing"),
                                                ("step", "missing")}, (name, value)  # fmt: skip
    # A file of torch is read from its end, so that what precedes it may be anything.
    behind = ("twice", "latin-1 before", "byte order mark", "NUL bytes after")
    for kind, corrupted in whole_mutations(whole):
        path.write_bytes(corrupted)
        assert refuses(restore) or kind in behind, kind
    path.unlink()
    path.mkdir()
    assert refuses(restore)


def test_a_fit_is_known_to_be_kept_before_it_begins(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError, match="cannot write"):
            FitCheckpoint(place, {})
