"""From what the user typed to a folder or file on disk: a local path, or a Hugging Face id."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from dzrobot.errors import CheckpointError

_REPO_ID = re.compile(r"(?!.*\.(?:pth|pt|bin|safetensors|json|yaml)$)[A-Za-z0-9][\w.-]*/[\w.-]+")
_REPO_FILE = re.compile(
    r"([A-Za-z0-9][\w.-]*/[\w.-]+)/((?:\w[\w.-]*/)*\w[\w.-]*\.(?:pth|pt|bin|safetensors))"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_STEP = re.compile(r"step_(\d{1,15})((?:_adapters)?)", re.ASCII)
CARD = "README.md"
_PLAIN_CARD = """---
tags: [LeRobot, robotics, dzrobot]
---

# {name}

A LeRobot dataset, recorded with dzrobot; `dzrobot inspect-data` shows what it holds.
"""
_PATTERNS = [
    "config.json", "*.safetensors", "*.safetensors.index.json", "experiment_cfg/*",
    "tokenizer/*", "*full_weights.pt",
    "dzrobot_passport.json", "adapter_config.json", "adapter_model.bin", "README.md", "SHA256SUMS",
]  # fmt: skip


def is_hub_file(text: str) -> bool:
    """Return whether ``text`` has the form ``owner/name/file.pth`` and is not a path here."""
    return _REPO_FILE.fullmatch(text) is not None and not Path(text).exists()


def is_hub_id(text: str) -> bool:
    """Return whether ``text`` has the form ``owner/name`` and is not a path on this machine."""
    return _REPO_ID.fullmatch(text) is not None and not Path(text).exists()


def commit_of(path: Path) -> str:
    """Return the commit of the hub's repository that ``path`` came from; empty for other files.

    Known in the hub's cache, and in a folder that ``dzrobot download`` or ``hf download`` filled.
    """
    for name, below in pairwise(path.parts):
        if name == "snapshots" and _COMMIT.fullmatch(below):
            return below
    folder = path if path.is_dir() else path.parent
    records = sorted((folder / ".cache" / "huggingface" / "download").glob("*.metadata"))
    for record in records:
        first = record.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        if _COMMIT.fullmatch(first):
            return first
    return ""


def step_path(path: Path) -> Path:
    """Return ``path``; where it says ``step_12`` for a run's ``step_00000012``, that folder."""
    named = _STEP.fullmatch(path.name)
    if named is None or path.exists():
        return path
    whole = path.with_name(f"step_{int(named[1]):08d}{named[2]}")
    return whole if whole.exists() else path


def steps_beside(path: Path) -> str:
    """Return the end of a message: the steps nearest to one that is not there; else ''."""
    named = _STEP.fullmatch(path.name)
    if named is None or not path.parent.is_dir():
        return ""
    beside = {p.name: found for p in path.parent.iterdir() if (found := _STEP.fullmatch(p.name))}
    nearest = sorted(beside, key=lambda name: abs(int(beside[name][1]) - int(named[1])))[:3]
    return f"; nearest there: {', '.join(nearest)}" if nearest else ""


def newest_step(run: Path) -> Path | None:
    """Return the newest checkpoint of a training run, an export if there is any; None: none.

    Args:
        run: The run's folder, or its ``export`` or ``checkpoints``.
    """
    for folder in (run / "export", run / "checkpoints", run):
        found = [
            (-len(named[2]), int(named[1]), path)
            for path in (folder.iterdir() if folder.is_dir() else ())
            if path.is_dir() and (named := _STEP.fullmatch(path.name))
        ]
        if found:
            # Adapters need their base: whole weights come first.
            return max(found)[2]
    return None


def pinned(path_or_repo: str | Path, revision: str | None = None) -> tuple[str | Path, str | None]:
    """Return a hub id and the revision that ``owner/name@REVISION`` names; all else as it is."""
    name, at, wanted = str(path_or_repo).rpartition("@")
    if at and wanted and revision is None and is_hub_id(name) and not Path(path_or_repo).exists():
        return name, wanted
    return path_or_repo, revision


def locate(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """Return the local path of a checkpoint; what a hub id names is fetched from the hub.

    The hub's cache is used, also offline (``HF_HUB_OFFLINE=1``).

    Args:
        path_or_repo: Folder, file, ``owner/name``, ``owner/name@REVISION``, or ``owner/name/file``
            for one file of it.
        revision: Branch, tag or commit of a hub repository.

    Raises:
        CheckpointError: There is no such path, or the repository cannot be had.
    """
    path_or_repo, revision = pinned(path_or_repo, revision)
    local = local_path(path_or_repo, revision)
    if local is not None:
        return local
    one = _REPO_FILE.fullmatch(str(path_or_repo))
    if one is not None:
        file = fetch(one[1], revision, [one[2]]) / one[2]
        if not file.is_file():
            raise CheckpointError(f"the hub's repository {one[1]} has no file {one[2]}")
        return file
    return fetch(str(path_or_repo), revision, _PATTERNS)


def local_path(path_or_repo: str | Path, revision: str | None = None) -> Path | None:
    """Return the path on this machine that is meant; None: it names something on the hub.

    Nothing is fetched or opened.

    Args:
        path_or_repo: As :func:`locate` takes it.
        revision: The same.

    Raises:
        CheckpointError: It is neither a path that is there nor a name on the hub.
    """
    path_or_repo, revision = pinned(path_or_repo, revision)
    path = Path(path_or_repo).expanduser()
    try:
        path = step_path(path)
        there = path.exists()
        usable = path.is_file() or path.is_dir()
    except (OSError, ValueError) as error:
        # Too long for a path, or with a NUL in it.
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(
            f"no checkpoint at {str(path)[:80]!r}: {reason}; give a folder, a file, or a Hugging "
            "Face id owner/name"
        ) from error
    if there and not usable:
        raise CheckpointError(f"{path} is neither a folder nor a file; give a checkpoint's")
    if there:
        if revision is not None:
            raise CheckpointError(
                f"{path} is a local path, revision={revision!r} has no meaning for it; leave the "
                "revision out"
            )
        return path
    if isinstance(path_or_repo, Path) or not (
        _REPO_FILE.fullmatch(path_or_repo) or _REPO_ID.fullmatch(path_or_repo)
    ):
        raise CheckpointError(
            f"no checkpoint at {path}; give a folder, a file, or a Hugging Face id owner/name"
            f"{steps_beside(path)}"
        )
    return None


def fetch(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the local copy of the matching files of a hub repository.

    Raises:
        CheckpointError: The hub cannot be reached and the cache lacks it, or it does not exist.
    """
    from huggingface_hub import snapshot_download

    remedy = "log in if it is gated, or download it elsewhere and give the folder"
    with _asking(_nothing(repo, revision), remedy):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))


def fetch_to(
    target: Path, repo: str, kind: str, revision: str | None, patterns: list[str] | None
) -> None:
    """Put the files of a hub repository into ``target``; a stopped download resumes.

    Args:
        target: Folder.
        repo: ``owner/name``.
        kind: ``model`` or ``dataset``.
        revision: Branch, tag or commit.
        patterns: Which files; None for all.

    Raises:
        CheckpointError: The hub cannot be reached, or there is no such repository.
    """
    from huggingface_hub import snapshot_download

    remedy = "log in (HF_TOKEN) if it is gated, or name a mirror (HF_ENDPOINT)"
    with _asking(_nothing(repo, revision), remedy):
        snapshot_download(
            repo, repo_type=kind, revision=revision, local_dir=target, allow_patterns=patterns
        )


def push_folder(folder: Path, repo: str, kind: str, *, private: bool) -> str:
    """Send ``folder`` to a hub repository, which is made if it is not there; return its address.

    Args:
        folder: Exported checkpoint or dataset. One without README.md gets a card on the hub.
        repo: ``owner/name``.
        kind: ``model`` or ``dataset``.
        private: Whether a repository that is made is seen by its owner alone.

    Raises:
        CheckpointError: The hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _asking(f"the hub did not take {repo}", "and that HF_TOKEN may write there"):
        api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)
        if not (folder / CARD).is_file():
            card = _PLAIN_CARD.format(name=repo).encode()
            api.upload_file(path_or_fileobj=card, path_in_repo=CARD, repo_id=repo, repo_type=kind)
        api.upload_folder(
            folder_path=folder, repo_id=repo, repo_type=kind,
            ignore_patterns=["*.partial", "*.lock"],
        )  # fmt: skip
    return f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"


@contextmanager
def _asking(outcome: str, remedy: str) -> Iterator[None]:
    """Turn what the hub's client raises into one sentence: outcome, reason, what to do."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{outcome} ({reason}); check the spelling and the network, {remedy}"
        ) from error


def _nothing(repo: str, revision: str | None) -> str:
    return (
        f"no local path {repo!r}, and the hub gave no repository of that name at revision "
        f"{revision or 'main'}"
    )
