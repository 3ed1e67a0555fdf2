"""Weights are named by all their bytes, and what came from the hub by its commit."""

import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from dzrobot.policies.dreamzero.checkpoints.checksums import (
    CHECKSUMS_FILE,
    files_hash,
    fingerprint,
    weights_hash,
    write_checksums,
)
from dzrobot.policies.dreamzero.checkpoints.hub import commit_of, local_path, pinned
from dzrobot.policies.dreamzero.checkpoints.sources import open_safetensors

COMMIT, DIGEST = "0123456789" * 4, "ab" * 32


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(folder, value=0.0, stem="model"):
    weight = torch.arange(4096, dtype=torch.float32)
    weight[100] += value
    folder.mkdir(exist_ok=True)
    save_file({"action_head.model.weight": weight}, folder / f"{stem}.safetensors")
    return open_safetensors(folder, stem)


def said(command, folder):
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    return done.stdout.split()[0]


def test_one_file_has_the_name_that_sha256sum_gives_it(tmp_path):
    source = written(tmp_path / "a")
    assert weights_hash(source) == said("sha256sum model.safetensors", tmp_path / "a")


def test_several_files_have_the_name_that_sha256sum_gives_their_list(tmp_path):
    folder = tmp_path / "a"
    for stem in ("model-2", "model-10", "model-1"):
        written(folder, stem=stem)
    listed = said("LC_ALL=C; sha256sum model-*.safetensors | sha256sum", folder)
    assert files_hash(folder.glob("*.safetensors")) == listed


def test_every_byte_counts(tmp_path):
    one, other = written(tmp_path / "a"), written(tmp_path / "b", value=1.0)
    # Sampled values do not see it.
    assert fingerprint(one, one.tensors) == fingerprint(other, other.tensors)
    assert weights_hash(one) != weights_hash(other)


def test_a_file_is_read_once_until_it_changes(tmp_path, own_cache):
    source = written(tmp_path / "a")
    first = weights_hash(source)
    (kept,) = (own_cache / "checksums").iterdir()
    kept.write_text(DIGEST)
    assert weights_hash(source) == DIGEST
    kept.write_text("damaged")
    assert weights_hash(source) == first
    kept.write_text(DIGEST)
    written(tmp_path / "a", value=1.0)
    assert weights_hash(source) not in (first, DIGEST)


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, own_cache):
    own_cache.write_text("a file in its place")
    source = written(tmp_path / "a")
    assert weights_hash(source) == said("sha256sum model.safetensors", tmp_path / "a")


def test_checksums_beside_the_weights_are_used_unless_they_are_older(tmp_path, own_cache):
    folder = tmp_path / "a"
    source = written(folder)
    os.utime(folder / "model.safetensors", (1, 1))
    write_checksums(folder)
    sums = folder / CHECKSUMS_FILE
    real = weights_hash(source)
    assert sums.read_text().startswith(real)
    assert not own_cache.exists(), "nothing was read"
    sums.write_text(sums.read_text().replace(real, DIGEST))
    assert weights_hash(source) == DIGEST
    written(folder, value=1.0)
    os.utime(sums, (2, 2))
    assert weights_hash(source) == said("sha256sum model.safetensors", folder)


def test_the_hubs_cache_knows_hash_and_commit(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    written(snapshot)
    (snapshot / "model.safetensors").rename(blobs / DIGEST)
    (snapshot / "model.safetensors").symlink_to(blobs / DIGEST)
    assert weights_hash(open_safetensors(snapshot)) == DIGEST
    assert commit_of(snapshot) == commit_of(snapshot / "model.safetensors") == COMMIT


def test_a_downloaded_folder_knows_its_commit(tmp_path):
    written(tmp_path / "a")
    assert commit_of(tmp_path / "a") == ""
    records = tmp_path / "a" / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    (records / "model.safetensors.metadata").write_text(f"{COMMIT}\n{DIGEST}\n1700000000.0\n")
    assert commit_of(tmp_path / "a") == COMMIT


def test_a_hub_id_may_name_its_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pinned("owner/name@v1.2") == ("owner/name", "v1.2")
    assert pinned("owner/name") == ("owner/name", None)
    assert pinned("./name@v1", None) == ("./name@v1", None)
    assert local_path("owner/name@v1") is None
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name@v1").mkdir()
    assert str(local_path("owner/name@v1")) == "owner/name@v1"
