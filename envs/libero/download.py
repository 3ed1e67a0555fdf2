"""Bring LIBERO's assets from the hub: file by file, verified, resumed where it stopped."""

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path

from dzrobot.envs.libero.assets import Asset, matches
from dzrobot.errors import SimulatorError

HUB_DATASET = "lerobot/libero-assets"
"""Dataset on the Hugging Face hub that holds them."""

Fetch = Callable[[str, Path], None]
"""``fetch(path, destination)``: bring one file of the dataset to ``destination``."""


def download(folder: Path, assets: Iterable[Asset], fetch: Fetch) -> Iterator[Asset]:
    """Bring every file of ``assets`` into ``folder``; yield each one when it is there and right.

    A file that is there already and right is not fetched again, so a second run resumes where the
    first stopped. Each file is fetched beside its place, verified, and only then moved.

    Raises:
        SimulatorError: a file cannot be fetched, or is not the official one.
    """
    for asset in assets:
        place = folder / asset.path
        if not matches(place, asset):
            _fetch_one(place, asset, fetch)
        yield asset


class HubFetch:
    """Fetches from the hub, keeping what a broken connection has brought so far.

    Args:
        stage: Folder for unfinished files; :meth:`clean` removes it.
    """

    def __init__(self, stage: Path) -> None:
        self._stage = stage

    def __call__(self, path: str, destination: Path) -> None:
        """Fetch ``path`` of the dataset to ``destination``.

        Raises:
            SimulatorError: the hub cannot be reached, or lacks the file.
        """
        # Loaded only when something is downloaded: it is slow.
        from huggingface_hub import hf_hub_download

        try:
            held = hf_hub_download(HUB_DATASET, path, repo_type="dataset", local_dir=self._stage)
        except _connection_errors() as error:
            raise SimulatorError(
                f"cannot download {path} from {HUB_DATASET} ({type(error).__name__}). Check the "
                "network and run `dzrobot libero setup` again: it resumes where it stopped. "
                "Without a network, copy the assets from another machine and run "
                "`dzrobot libero setup --assets DIR`."
            ) from error
        Path(held).replace(destination)

    def clean(self) -> None:
        """Remove what is left of unfinished files."""
        shutil.rmtree(self._stage, ignore_errors=True)


def _fetch_one(place: Path, asset: Asset, fetch: Fetch) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.part")
    fetch(asset.path, part)
    if not matches(part, asset):
        size = part.stat().st_size if part.is_file() else 0
        part.unlink(missing_ok=True)
        raise SimulatorError(
            f"{asset.path} arrived damaged ({size} bytes, {asset.size} expected, or another "
            "SHA-256). Run `dzrobot libero setup` again."
        )
    part.replace(place)


def _connection_errors() -> tuple[type[Exception], ...]:
    errors = import_module("huggingface_hub.errors")
    found: tuple[type[Exception], ...] = (OSError, errors.HfHubHTTPError)
    # What the hub's client sends requests with has changed between its versions.
    if importlib.util.find_spec("httpx") is not None:
        found = (*found, import_module("httpx").HTTPError)
    return found
