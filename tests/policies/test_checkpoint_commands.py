"""`dzrobot inspect` and `dzrobot convert`, as they are typed."""

import json
import re
import shutil

import pytest
import torch
from checkpoint_layouts import (
    absent_from_components,
    tensors_of,
    write_components,
    write_dcp_run,
    write_pickled,
)

from dzrobot.cli import main
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.checksums import CHECKSUMS_FILE
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
from dzrobot.policies.dreamzero.checkpoints.inspection import expected_memory, inspect_checkpoint
from dzrobot.policies.dreamzero.network.config import preset
from dzrobot.policies.dreamzero.policy import DreamZeroPolicy


def typed(capsys, *arguments):
    """Return exit code, output and errors of one command, in single spaces."""
    code = main([str(argument) for argument in arguments])
    text = capsys.readouterr()
    return code, re.sub(r"\s+", " ", text.out), text.err


def same_bits(given, wanted):
    given, wanted = tensors_of(given), tensors_of(wanted)
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert given[name].dtype == tensor.dtype
        assert given[name].shape == tensor.shape
        given_bits, bits = (t.reshape(-1).view(torch.uint8) for t in (given[name], tensor))
        assert torch.equal(given_bits, bits), name


def sidecars(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "safetensors" not in path.name and path.name != CHECKSUMS_FILE
    }


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_again(tiny, tmp_path, capsys, dtype):
    """Folder -> distributed -> full weights -> folder, bit for bit, and all that lies beside."""
    start = tmp_path / "start"
    assert typed(capsys, "convert", tiny, start, "--dtype", dtype)[0] == 0
    assert typed(capsys, "convert", start, tmp_path / "dcp", "--to", "dcp")[0] == 0
    assert (tmp_path / "dcp/.metadata").is_file()
    assert (
        typed(
            capsys,
            "convert",
            tmp_path / "dcp",
            tmp_path / "full_weights.pt",
            "--to",
            "full_weights",
        )[0]
        == 0
    )
    file = tmp_path / "full_weights.pt"
    flat = torch.load(file, weights_only=True)
    assert flat.keys() == tensors_of(start).keys()
    code, out, _ = typed(
        capsys, "convert", file, tmp_path / "end", "--config-from", start, "--shard-gb", "0.0004"
    )
    assert code == 0
    assert "wrote" in out
    shards = sorted((tmp_path / "end").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 500_000 for shard in shards)
    readable = (tmp_path / "end").stat().st_mode & 0o666
    assert {shard.stat().st_mode & 0o777 for shard in shards} == {readable}
    index = json.loads((tmp_path / "end/model.safetensors.index.json").read_text())
    names = list(index["weight_map"])
    assert names == sorted(names)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in flat.values())
    same_bits(tmp_path / "end", start)
    assert sidecars(tmp_path / "end") == sidecars(start)


@pytest.mark.parametrize("write", [write_dcp_run, lambda o, t: write_pickled(o, t, "model")])
def test_training_run_to_official_folder(tiny, tmp_path, capsys, write):
    run = write(tiny, tmp_path / "global_step_7")
    assert typed(capsys, "convert", run, tmp_path / "official")[0] == 0
    given, wanted = tensors_of(tmp_path / "official"), tensors_of(tiny)
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[n].reshape(t.shape), t) for n, t in wanted.items())
    head = json.loads((tmp_path / "official/config.json").read_text())["action_head_cfg"]["config"]
    assert head["skip_component_loading"] is True
    assert head["defer_lora_injection"] is False


def test_cold_start_lists_what_it_draws(tiny, tmp_path, capsys):
    wan = write_components(tiny, tmp_path / "wan")
    code, out, _ = typed(capsys, "convert", wan, tmp_path / "start", "--config-from", tiny)
    assert code == 0
    fresh = absent_from_components(
        tensors_of(tiny), open_checkpoint(tiny).config.dit.model_type
    )  # fmt: skip
    assert f"{len(fresh)} of them are in no file and were newly initialized" in out
    assert all(name in out for name in fresh)


@pytest.fixture
def loose(tiny, tmp_path):
    """Return a run's ``full_weights.pt``, and the flags that say what it is, as RLinf's guide does.

    The tiny network has no preset: its config.json stands in for one, with sizes of another robot.
    """
    run = tmp_path / "run"
    run.mkdir()
    assert main(["convert", str(tiny), str(run / "full_weights.pt")]) == 0
    config = json.loads((tiny / "config.json").read_text())
    config["action_head_cfg"]["config"]["action_horizon"] = 24
    network, metadata = tmp_path / "network.json", tmp_path / "metadata.json"
    network.write_text(json.dumps(config))
    shutil.copy(tiny / "experiment_cfg/metadata.json", metadata)
    # The published tokenizer is on the hub; that of the tiny network is nowhere.
    shutil.copytree(tiny / "tokenizer", run / "tokenizer")
    flags = ("--preset", network, "--metadata", metadata, "--embodiment", "libero_sim")
    return run / "full_weights.pt", flags


def test_a_preset_statistics_and_a_robot_describe_loose_weights(tiny, loose, tmp_path, capsys):
    file, flags = loose
    code, out, _ = typed(capsys, "inspect", file, *flags)
    assert code == 0
    for text in ("weights complete", "embodiments libero_sim", "action horizon 16"):
        assert text in out
    assert typed(capsys, "convert", file, tmp_path / "whole", *flags)[0] == 0
    same_bits(tmp_path / "whole", tiny)
    for name in ("config.json", "experiment_cfg/metadata.json"):
        written, own = (
            json.loads((root / name).read_text()) for root in (tmp_path / "whole", tiny)
        )
        assert written == own


def test_loose_weights_act_as_their_folder_does(tiny, loose, tmp_path, capsys):
    file, flags = loose
    common = (
        "--env", "dzrobot/point-v0", "--tasks", "0", "--episodes", "1", "--max-steps", "2",
        "--workers", "0", "--videos", "none", "--predictions", "off",
    )  # fmt: skip
    records, cards = [], []
    for name, given in (("folder", (tiny,)), ("loose", (file, *flags))):
        folder = tmp_path / f"results of {name}"
        assert typed(capsys, "eval", "--checkpoint", *given, *common, "--output", folder)[0] == 0
        records.append(json.loads((folder / "records.jsonl").read_text()))
        cards.append(json.loads((folder / "card.json").read_text())["policy"])
    assert records[0]["action_sha256"] == records[1]["action_sha256"]
    assert cards[0].pop("checkpoint") != cards[1].pop("checkpoint")
    # The same values in files of another layout.
    assert cards[0].pop("weights") != cards[1].pop("weights")
    assert cards[0] == cards[1]


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_what_is_missing_of_loose_weights_is_named(tiny, loose, tmp_path, capsys, command):
    file, flags = loose
    preset, _, robot = (flags[i : i + 2] for i in (0, 2, 4))
    target = (tmp_path / "whole",) if command == "convert" else ()

    def refused(checkpoint, *flags):
        code, _, said = typed(capsys, command, checkpoint, *target, *flags)
        assert code == 2
        assert not any(path.exists() for path in target)
        return said

    for text in ("--preset 5b --metadata FILE --embodiment TAG", "--config-from DIR"):
        assert text in refused(file)
    assert "nothing says which that is: give --embodiment" in refused(file, *preset)
    assert "no statistics at" in refused(file, *preset, "--metadata", tmp_path / "absent.json")
    assert "unknown network '6b'" in refused(file, "--preset", "6b", *robot)
    assert "leave one of them out" in refused(file, *preset, "--config-from", tiny)
    assert "says what network the weights are: leave" in refused(tiny, *preset, *robot)
    others = tmp_path / "others.json"
    others.write_text(json.dumps({"my_arm": {}}))
    assert "and " + str(others) + " others" in refused(tiny, "--metadata", others)


def test_inspect(tiny, capsys):
    code, out, _ = typed(capsys, "inspect", tiny)
    assert code == 0
    for text in ("weights complete", "embodiments libero_sim", "action horizon 16", "32 x 64"):
        assert text in out
    style = {"5b": "5B-style (ti2v), Wan 2.2", "14b": "14B-style (i2v), Wan 2.1"}[tiny.name]
    assert f"variant {style} autoencoder" in out
    for part in ("transformer", "text encoder", "image encoder", "autoencoder"):
        assert re.search(rf"{part} │ \d+ │ [\d,]+ │ [\d.]+ \w+ │ float32", out)


def test_inspect_says_what_is_wrong(tiny, tmp_path, capsys):
    folder = shutil.copytree(tiny, tmp_path / "broken")
    from safetensors.torch import save_file

    state = tensors_of(folder)
    state.pop("action_head.model.head.modulation")
    state["action_head.more"] = torch.ones(1)
    save_file(state, folder / "model.safetensors")
    shutil.rmtree(folder / "experiment_cfg")
    code, out, _ = typed(capsys, "inspect", folder)
    assert code == 1
    assert "1 missing: action_head.model.head.modulation" in out
    assert "1 unexpected: action_head.more" in out
    assert "no metadata.json" in out


def test_errors_are_one_message(tmp_path, capsys):
    for command in (["inspect", tmp_path], ["convert", tmp_path, tmp_path / "x"]):
        code, out, err = typed(capsys, *command)
        assert code == 2
        assert not out
        assert "holds no weights" in err
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1


@pytest.mark.long
def test_numbers_of_the_published_networks(tiny_folders):
    """22.92 and 12.62 billion parameters in bfloat16; 108.6 million trained by LoRA."""
    for size, total in (("5b", 12.62e9), ("14b", 22.92e9)):
        memory = expected_memory(preset(size))
        assert memory.inference == pytest.approx(2 * total, rel=1e-3)
        assert memory.full > memory.lora > memory.inference > memory.session > 0
        assert memory.whole > memory.quantized > memory.offloaded > 0
    assert memory.lora - memory.inference == 16 * 108_582_944
    report = inspect_checkpoint(open_checkpoint(tiny_folders / "5b"))
    assert sum(part.parameters for part in report.parts) * 2 == report.memory.inference


def test_tokenizer_not_found(tiny, libero, tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer at .* download google/umt5-xxl"):
        DreamZeroPolicy.from_pretrained(tiny, embodiment=libero, tokenizer=tmp_path / "nowhere")


def test_tokenizer_of_another_network(tiny, libero, tmp_path):
    """Ids the network has no row for are refused, not looked up beyond the table."""
    folder = shutil.copytree(tiny, tmp_path / "other")
    file = folder / "tokenizer/tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["Ġrobot"] = 10_000
    file.write_text(json.dumps(data))
    policy = DreamZeroPolicy.from_pretrained(folder, embodiment=libero)
    import numpy as np

    seen = {
        **{v.key: np.zeros((*v.resolution, 3), np.uint8) for v in libero.views},
        **{p.key: np.zeros(p.dim, np.float32) for p in libero.state},
        libero.language: "go",
    }
    with pytest.raises(CheckpointError, match="ids up to 10000, the network knows 768"):
        policy.act(seen)
