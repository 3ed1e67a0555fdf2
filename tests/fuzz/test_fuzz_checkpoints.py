"""Corrupted checkpoints: every document and every file of one, in every way the harness knows.

Read in this process, where a fault is an exception, and by the commands for a part of them.
"""

import json
import shutil

import pytest
import torch
from harness import HEAVY, assert_held, corrupted, mutations, refuses, whole_mutations
from hypothesis import HealthCheck, given, settings

from dzrobot.documents import read_json, validated
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import CheckpointError
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.directory import (
    CONFIG_FILE,
    METADATA_FILE,
    TRAINING_FILE,
    PublishedTraining,
    open_checkpoint,
    read_metadata,
)
from dzrobot.policies.dreamzero.checkpoints.inspection import inspect_checkpoint
from dzrobot.policies.dreamzero.checkpoints.load import build_network
from dzrobot.policies.dreamzero.checkpoints.passport import PASSPORT_FILE, read_passport
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint
from dzrobot.training.run.checkpoint import TrainingMeta

run = HEAVY.run
META = {
    "format": 2, "step": 4, "skips": 0, "base": "0" * 64, "is_lora": False, "ema": False,
    "seed": 3, "global_batch_size": 4, "max_steps": 8, "statistics": ["0" * 64], "windows": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def robot():
    return load_embodiment("libero_sim")


@pytest.fixture(scope="module")
def good(tmp_path_factory, robot):
    """Return a checkpoint of three shards with everything beside it."""
    options = TinyOptions(dtype=torch.float32, shard_bytes=1_000_000, with_passport=True)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("good") / "tiny", robot, options)


def readers(robot):
    """Return what reads each document: file -> function of the folder it lies in."""

    def config(folder):
        build_network(
            NetworkConfig.from_dict(read_json(folder / CONFIG_FILE, dict, CheckpointError))
        )

    def metadata(folder):
        read_metadata(folder / METADATA_FILE)
        Statistics.from_metadata(folder / METADATA_FILE, robot)

    return {
        CONFIG_FILE: config,
        str(METADATA_FILE): metadata,
        PASSPORT_FILE: read_passport,
        "model.safetensors.index.json": open_checkpoint,
        "meta.json": lambda folder: read_json(folder / "meta.json", TrainingMeta, CheckpointError),
    }


def document(good, name):
    return META if name == "meta.json" else json.loads((good / name).read_text())


DOCUMENTS = tuple(readers(None))


def thinned(cases, most=45):
    """Return at most ``most`` of the cases, evenly spread."""
    cases = list(cases)
    return cases[:: max(1, -(-len(cases) // most))]


@pytest.mark.sampled
@pytest.mark.parametrize("name", DOCUMENTS)
def test_corrupted_documents(good, robot, tmp_path, name):
    """Each is read or refused with a message; nothing else is raised."""
    folder = shutil.copytree(good, tmp_path / "corrupted")
    cases = thinned(mutations(document(good, name)))
    refused = 0
    for kind, content in cases:
        (folder / name).write_bytes(content)
        try:
            refused += refuses(lambda: readers(robot)[name](folder)) is not None
        except Exception as error:
            raise AssertionError(f"{name}: {kind}: {type(error).__name__}: {error}") from error
    assert refused > len(cases) // 4


@pytest.mark.sampled
@pytest.mark.parametrize("name", [CONFIG_FILE, PASSPORT_FILE, "meta.json"])
def test_anything_in_any_field(good, robot, tmp_path, name):
    folder = shutil.copytree(good, tmp_path / "any")

    @settings(
        max_examples=25, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(corrupted(document(good, name)))
    def check(content):
        (folder / name).write_bytes(content)
        refuses(lambda: readers(robot)[name](folder))

    check()


def test_corrupted_training_config(good, tmp_path):
    """The YAML beside published weights."""
    folder = shutil.copytree(good, tmp_path / "corrupted")
    text = (good / TRAINING_FILE).read_bytes()
    more = [
        ("date", b"relative_action: 2020-13-45"),
        ("tag", b"relative_action: !!bool maybe"),
        ("object", b"a: !!python/object/apply:os.system [id]"),
        ("aliases", b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9))
            for i in range(9)
        )),
        ("number", b"relative_action_keys: 5"),
        ("deep", b"a: " + b"[" * 5000 + b"]" * 5000),
    ]  # fmt: skip
    for kind, content in [*whole_mutations(text), *more]:
        (folder / TRAINING_FILE).write_bytes(content)
        try:
            refuses(lambda: open_checkpoint(folder).training)
        except Exception as error:
            raise AssertionError(f"{kind}: {type(error).__name__}: {error}") from error
    assert validated({}, PublishedTraining, "", CheckpointError).relative_action is None


def test_corrupted_headers(good, tmp_path):
    """What is no header of safetensors, and headers that announce what is not there."""
    folder = shutil.copytree(good, tmp_path / "corrupted")
    file = next(folder.glob("model-00001-of-*.safetensors"))
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    name = next(iter(header.keys() - {"__metadata__"}))
    only = [(name, field) for field in ("dtype", "shape", "data_offsets")]
    cases = [
        (kind, len(content).to_bytes(8, "little") + content + whole[8 + size :])
        for kind, content in mutations(header, only=only)
    ]
    for kind, content in [*thinned(cases, 60), *whole_mutations(whole[:4096])]:
        file.write_bytes(content)
        try:
            assert refuses(lambda: inspect_checkpoint(open_checkpoint(folder))) or content == whole
        except AssertionError:
            assert kind in ("one more field",) or refuses(lambda: open_checkpoint(folder)) is None
        except Exception as error:
            raise AssertionError(f"{kind}: {type(error).__name__}: {error}") from error


PLACES = ("x" * 5000, "a/" + "y" * 300, "/dev/null", "/dev/zero", "nowhere/at/all", "a\0b", "")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: repr(place[:12]))
def test_places_that_are_no_checkpoint(place):
    assert refuses(lambda: open_checkpoint(place))


@pytest.fixture(scope="module")
def price(good):
    """Return what it costs to inspect the good one."""
    result = run(["inspect", good])
    assert result.code == 0, result.output
    return result


COMMANDED = [
    (CONFIG_FILE, b"[" * 100_000 + b"]" * 100_000),
    (CONFIG_FILE, b'{"action_head_cfg": 1e400}'),
    (PASSPORT_FILE, b'{"format": 1, "embodiments": {}, "action_horizon": 1, "base": 5}'),
    (PASSPORT_FILE, b'{"format": 1, "embodiments": {}, "action_horizon": 1, "recipe": []}'),
    (str(METADATA_FILE), b"\xff\xfe"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "content"), COMMANDED)
def test_commands_say_it_in_one_message(good, price, tmp_path, name, content):
    folder = shutil.copytree(good, tmp_path / "corrupted")
    (folder / name).write_bytes(content)
    assert_held(run(["inspect", folder]), price, codes=(2,))


TARGETS = ("/proc/x", "{good}/config.json/x", "{good}", "{tmp}/" + "z" * 300)


@pytest.mark.parametrize("target", TARGETS)
def test_places_that_cannot_be_written(good, price, tmp_path, target):
    place = target.format(good=good, tmp=tmp_path)
    assert_held(run(["convert", good, place]), price, codes=(2,))


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "0", "x", "²"])
def test_sizes_that_are_none(good, price, tmp_path, size):
    argv = ["convert", good, tmp_path / "x", "--shard-gb", size]
    assert_held(run(argv), price, codes=(2,))
