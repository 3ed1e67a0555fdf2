"""Write what RLinf's own transforms make of prompts and views to rlinf_layouts.json.

    pip download --no-deps rlinf==0.3.0
    python tests/embodiments/make_rlinf_layouts.py rlinf-0.3.0-py3-none-any.whl

Their prompts and their tiling need NumPy alone; what else their modules import (dreamzero's groot,
torch, einops) is replaced by empty modules.
"""

import hashlib
import importlib
import json
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np

TARGET = Path(__file__).with_name("rlinf_layouts.json")
TAGS = ("libero_sim", "franka_pnp", "oxe_droid")
PACKAGE = "rlinf.data.datasets.dreamzero.data_transforms"
TASK = "pick up the red cup"
ABSENT = ("groot", "torch", "einops", "tree", "transformers", "PIL")


class _Empty(types.ModuleType):
    """A module of which every name is a class."""

    __path__ = ()

    def __getattr__(self, name):
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


def views(count):
    """Return views (v, 1, 3, 4, 6) whose pixels say which they are."""
    return np.arange(count * 72, dtype=np.uint8).reshape(count, 1, 3, 4, 6)


def main(wheel):
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, str(wheel))
    # Its packages import the rest of the program when they are imported themselves.
    parts = PACKAGE.split(".")
    for end in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:end]))
        package.__path__ = [f"{wheel}/{'/'.join(parts[:end])}"]
        sys.modules[package.__name__] = package
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = {"rlinf": wheel.name, "sha256": digest, "task": TASK}
    for tag in TAGS:
        module = importlib.import_module(f"{PACKAGE}.{tag}")
        own = (v for v in vars(module).values() if isinstance(v, type))
        (kind,) = (one for one in own if vars(one).get("TAG") == tag)
        count = len(module._VIDEO_KEYS)
        found[tag] = {
            "views": list(module._VIDEO_KEYS), "state": list(module._STATE_KEYS),
            "action": list(module._ACTION_KEYS), "prompt": kind.format_training_prompt(TASK),
            "tiled": kind.concat_multiview_video(views(count))[0, 0, 0].tolist(),
        }  # fmt: skip
    TARGET.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
