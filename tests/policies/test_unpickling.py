"""No reader in the package can unpickle a foreign class, or takes memory that a file announces."""

import ast
import contextlib
import io
import pickle
import resource
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.unpickling import load_listed, load_tensors

ROOT = Path(__file__).parents[2]
FOLDERS = ("dzrobot", "envs", "policies", "training", "examples", "benchmarks", "plugins")
FILES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
)  # fmt: skip

READERS = {
    "pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle",
    "torch.distributed.checkpoint.state_dict_loader", "torch.distributed.checkpoint",
}  # fmt: skip
"""Modules from which a call of ``load``, ``loads`` or ``Unpickler`` opens a pickle."""

OWN_CHILDREN = ("envs/driver_process.py",)
"""A process and the child it started talk over a socket pair, which nobody else can open."""


def full_names(tree):
    """Return what each imported name stands for."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def called(node, known):
    """Return the full dotted name of what a call calls."""
    parts = []
    function = node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    return ".".join([known.get(function.id, function.id), *reversed(parts)])


def given(node, name):
    return next((word.value for word in node.keywords if word.arg == name), None)


def is_constant(value, wanted):
    return isinstance(value, ast.Constant) and value.value is wanted


def is_safe_class(node):
    """Return whether a subclass of a reader of pickles says what it lets through."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    own = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    needed = {"Unpickler": {"find_class"}, "FileSystemReader": {"read_metadata", "read_data"}}
    return all(needed.get(base, set()) <= own for base in bases)


def is_safe_call(node, known, source):
    """Return whether a call opens no pickle, or one under limits."""
    module, _, last = called(node, known).rpartition(".")
    if last == "load" and module == "torch":
        return is_constant(given(node, "weights_only"), wanted=True)
    if last == "load" and module.startswith("torch.distributed.checkpoint"):
        return given(node, "storage_reader") is not None and "CheckedReader" in source
    if last in ("load", "loads", "Unpickler") and module in READERS:
        return False
    if module == "yaml" and last in ("unsafe_load", "full_load"):
        return False
    if last in ("read_pickle", "dcp_to_torch_save", "FileSystemReader", "PackageImporter"):
        return False
    if last == "load" and module in ("torch.jit", "torch.hub", "torch.export"):
        return False
    if given(node, "trust_remote_code") is not None:
        return False
    allow = given(node, "allow_pickle")
    return allow is None or is_constant(allow, wanted=False)


def opens_pickles(source):
    """Return the lines that read a pickle without limits."""
    tree = ast.parse(source)
    known = full_names(tree)
    classes = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and not is_safe_class(n))
    calls = (
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and not is_safe_call(n, known, source)
    )
    return [node.lineno for node in (*classes, *calls)]


def test_nothing_unpickles_freely():
    found = []
    for path in FILES:
        source = path.read_text()
        if path.relative_to(ROOT).as_posix() in OWN_CHILDREN:
            source = source.replace("pickle.loads(", "own_child.loads(")
        found += [f"{path}:{line}" for line in opens_pickles(source)]
    assert not found


def test_own_children_have_nameless_sockets():
    sources = "".join((ROOT / name).read_text() for name in OWN_CHILDREN)
    assert "socketpair(" in sources
    assert ".bind(" not in sources
    assert ".connect(" not in sources


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "from torch import load\nload(f)",
        "import pickle\npickle.load(f)",
        "from pickle import loads as read\nread(f)",
        "import pickle\nclass U(pickle.Unpickler):\n    pass",
        "import torch.distributed.checkpoint as dcp\ndcp.load({}, checkpoint_id=f)",
        "from torch.distributed.checkpoint.state_dict_loader import load\nload({}, f)",
        "from torch.distributed.checkpoint import FileSystemReader\nFileSystemReader(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import yaml\nyaml.unsafe_load(f)",
        "import torch\ntorch.jit.load(f)",
        "import torch\ntorch.export.load(f)",
        "from torch.package import PackageImporter\nPackageImporter(f)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(f, trust_remote_code=True)",
    ],
)
def test_the_scan_sees_it(source):
    assert opens_pickles(source)


def announcing(kind):
    """Return a short pickle that announces gigabytes."""
    number = 6_000_000_000
    return {
        "text": b"\x80\x04\x8d" + struct.pack("<Q", number) + b"abc.",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", number) + b"abc.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", number) + b"abc.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", number) + b"N.",
        "memo": b"\x80\x02]r" + struct.pack("<I", 400_000_000) + b".",
        "terabytes of text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
        "stop only": b".",
        "nothing": b"",
        "size": b"\x80\x02ctorch\nSize\nK\x05\x85R.",
        "unknown code": b"\xff\xff\xff",
    }[kind]


KINDS = (
    "text", "bytes", "bytearray", "frame", "memo", "terabytes of text", "stop only", "nothing",
    "size", "unknown code",
)  # fmt: skip


@pytest.fixture
def little_memory():
    """Refuse this process more than half a gigabyte beyond what it has."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 29), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["description", "plain .pt", "zipped .pt"])
def test_announced_memory_is_not_taken(tmp_path, little_memory, kind, way):
    file = tmp_path / "file.pt"
    content = announcing(kind)
    if way == "zipped .pt":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3")
    else:
        file.write_bytes(content)
    before = peak()
    # Some mean something harmless to one of the readers, and are read.
    with contextlib.suppress(CheckpointError):
        load_listed(file, {"torch": {"Size"}}) if way == "description" else load_tensors(file)
    assert peak() - before < 200 * 2**20


def test_a_packed_archive_is_refused(tmp_path):
    """A megabyte of nothing takes a kilobyte when packed; torch writes nothing packed."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 18)}, buffer)
    with (
        zipfile.ZipFile(buffer) as plain,
        zipfile.ZipFile(tmp_path / "file.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        load_tensors(tmp_path / "file.pt")


def test_what_is_listed_is_read(tmp_path):
    (tmp_path / "file").write_bytes(pickle.dumps(torch.Size([1, 2])))
    assert load_listed(tmp_path / "file", {"torch": {"Size"}}) == torch.Size([1, 2])
    with pytest.raises(CheckpointError, match=r"it asks for torch\.Size"):
        load_listed(tmp_path / "file", {})
