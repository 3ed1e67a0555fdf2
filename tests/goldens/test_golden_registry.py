"""The harness itself: names of files do not matter, and nothing passes by accident."""

import hashlib
import json
import math
import re
import shutil

import pytest
import torch
from golden_kinds.registry import (
    Golden,
    all_checkers,
    exact,
    manifests,
    passes,
    relative_l2,
    worst,
)

from conftest import SELECTION, reference_numbers
from dzrobot.modality.window import clean_instruction
from dzrobot.policies.dreamzero.network.prompt import clean

pytestmark = pytest.mark.goldens


def test_every_kind_of_the_folder_has_a_checker(goldens):
    kinds = {golden.kind for golden in manifests(goldens)}
    assert kinds
    assert kinds <= all_checkers().keys()


def test_the_selection_is_small_and_described_file_by_file():
    rows = re.findall(
        r"^\| `([\w.]+)` \| ([\d,]+) \| `(\w{64})` \|$",
        (SELECTION / "README.md").read_text(), flags=re.MULTILINE,
    )  # fmt: skip
    said = {name: (int(size.replace(",", "")), digest) for name, size, digest in rows}
    files = {path.name: path.read_bytes() for path in SELECTION.iterdir() if path.suffix != ".md"}
    assert said == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()
    }
    assert sum(map(len, files.values())) <= 5_000_000


def test_the_selection_has_whole_networks_of_both_kinds_and_every_small_kind():
    kinds = {golden.kind for golden in manifests(SELECTION)}
    # The parts of whole networks by themselves are too large.
    assert all_checkers().keys() - kinds == {
        "dit_train_forward", "dit_ar_inference_kv_cache", "vae21", "vae22"
    }  # fmt: skip


def test_without_anything_beside_the_checkout_the_selection_is_compared(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert reference_numbers(None, nowhere) == SELECTION
    assert reference_numbers(None, tmp_path) == tmp_path
    assert reference_numbers(str(tmp_path), nowhere) == tmp_path
    # A folder that was asked for is not replaced.
    assert reference_numbers(str(nowhere), tmp_path) is None


def test_files_under_other_names_are_checked_alike(goldens, tmp_path):
    kinds = {"umt5_text_encoder", "weights", "schedulers"}
    chosen = [golden for golden in manifests(goldens) if golden.kind in kinds]
    for number, golden in enumerate(chosen):
        path = tmp_path / f"file_{number}.json"
        stored = f"numbers_{number}.safetensors"
        shutil.copy(goldens / golden.manifest["file"], tmp_path / stored)
        path.write_text(json.dumps(golden.manifest | {"file": stored}))
        assert Golden(path).check() == golden.check()


def test_instructions_with_entities_and_blanks_are_compared_as_the_tokenizer_cleans_them(
    goldens, tmp_path
):
    golden = next(g for g in manifests(goldens) if g.kind == "input_transforms")
    shutil.copy(goldens / golden.manifest["file"], tmp_path)
    path = tmp_path / "x.json"
    # From one to the other: a folder of another seed may hold such an instruction itself.
    odd = asking(golden.manifest, "Open  the &amp; top Drawer")
    assert "open the & top drawer" in odd["prompts_out"]["text"][0]
    for manifest in (odd, asking(odd, "Wipe the  table &amp; go")):
        path.write_text(json.dumps(manifest))
        assert passes(Golden(path).check())
        path.write_text(json.dumps({**manifest, "prompt": "Open it"}))
        assert not passes(Golden(path).check())


def asking(manifest, prompt):
    """Return the manifest with another instruction, in the recorded prompts too."""
    texts = []
    for number, text in enumerate(manifest["prompts_out"]["text"]):
        end = " now" if number else ""
        was, new = (clean(clean_instruction(p + end)) for p in (manifest["prompt"], prompt))
        assert was in text
        texts.append(text.replace(was, new))
    return {**manifest, "prompt": prompt, "prompts_out": {**manifest["prompts_out"], "text": texts}}


def test_changed_numbers_and_unknown_kinds_fail(goldens, tmp_path):
    golden = next(g for g in manifests(goldens) if g.kind == "umt5_text_encoder")
    data = bytearray((goldens / golden.manifest["file"]).read_bytes())
    data[-1] ^= 1
    (tmp_path / golden.manifest["file"]).write_bytes(data)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(golden.manifest))
    assert Golden(path).check()["sha256"] == (math.inf, 0.0)

    path.write_text(json.dumps(golden.manifest | {"kind": "another"}))
    with pytest.raises(KeyError, match="no checker for kind 'another'"):
        Golden(path).check()


def test_errors_are_relative_and_nan_or_another_shape_never_passes():
    ones = torch.ones(3)
    assert relative_l2(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_l2(ones[:2], ones) == math.inf
    assert not passes({"a": (math.nan, 1.0)})
    assert not passes({"a": exact(1, 2)})
    assert passes({"a": exact([1], [1]), "b": (1e-6, 1e-5)})
    assert worst({"a": (0.0, 0.0), "b": (9e-6, 1e-5), "c": (1e-6, 1e-5)})[0] == "b"
    assert worst({"a": (math.nan, 1.0), "b": (9e-6, 1e-5)})[0] == "a"
