"""From a folder of reference numbers to relative errors: one checker per kind of manifest.

A manifest ``X.json`` says with ``kind`` what it documents and with ``config`` at which widths; the
numbers lie in ``X.safetensors``. A checker reads both through a ``Golden`` and returns
``{quantity: (error, tolerance)}``, where the error is relative L2 unless it says otherwise. No
checker may depend on a file's name, on a width or on a seed, so any folder with the same kinds can
be checked.

To add a kind, write a function in any module of this folder:

    @checker("dit_train_forward")
    def dit_train(golden: Golden) -> Results:
        ...
        return {"out.video": (relative_l2(video, golden["out.video"]), 1e-5)}
"""

import hashlib
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Results = dict[str, tuple[float, float]]
Checker = Callable[["Golden"], Results]

CPU = torch.device("cpu")

CHECKERS: dict[str, Checker] = {}


def checker(*kinds: str) -> Callable[[Checker], Checker]:
    """Register the decorated function for manifests of these kinds."""

    def register(function: Checker) -> Checker:
        for kind in kinds:
            assert kind not in CHECKERS, f"two checkers for {kind!r}"
            CHECKERS[kind] = function
        return function

    return register


@dataclass(frozen=True)
class Golden:
    """One manifest and its tensors."""

    path: Path
    device: torch.device = CPU
    """Where whole networks (kinds ``head_*``) are run; the others stay on the processor."""

    dtype: torch.dtype = torch.float32
    """What whole networks compute in."""

    @cached_property
    def manifest(self) -> Any:
        """The parsed json: a dict, for some kinds a list."""
        return json.loads(self.path.read_text())

    @cached_property
    def kind(self) -> str:
        """What the manifest documents; told from the entries where it has no ``kind``."""
        manifest = self.manifest
        if isinstance(manifest, dict) and "kind" in manifest:
            return str(manifest["kind"])
        for kind, recognizes in _UNNAMED_KINDS.items():
            if recognizes(manifest):
                return kind
        return "unknown"

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor as stored."""
        return load_file(self.path.parent / self.manifest["file"])

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor; bf16 is upcast to fp32, in which everything is computed."""
        tensor = self.tensors[name].to(self.device)
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def weights(self, prefix: str = "w.") -> dict[str, Tensor]:
        """Return the fp32 weights below ``prefix``, the prefix taken off."""
        return {
            name.removeprefix(prefix): self[name]
            for name in self.tensors
            if name.startswith(prefix)
        }

    def companion(self, entry: str = "weights_file") -> "Golden":
        """Return the manifest of another file of the folder that this one names."""
        path = (self.path.parent / self.manifest[entry]).with_suffix(".json")
        return replace(self, path=path)

    def check(self) -> Results:
        """Return the errors of every documented quantity."""
        results: Results = {}
        if isinstance(self.manifest, dict) and "sha256" in self.manifest:
            digest = hashlib.sha256(
                (self.path.parent / self.manifest["file"]).read_bytes()
            ).hexdigest()
            results["sha256"] = exact(digest, self.manifest["sha256"])
        if self.kind not in all_checkers():
            raise KeyError(
                f"{self.path.name}: no checker for kind {self.kind!r}; known: {sorted(CHECKERS)}"
            )
        checked = CHECKERS[self.kind](self)
        assert checked, f"the checker of {self.kind!r} compared nothing"
        return results | checked


def all_checkers() -> Mapping[str, Checker]:
    """Return the checkers of every module of this folder."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return CHECKERS


def manifests(folder: Path) -> Iterator[Golden]:
    """Yield every manifest of ``folder``."""
    for path in sorted(folder.glob("*.json")):
        yield Golden(path)


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|, infinite where the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = (tensor.detach().cpu().double() for tensor in (actual, expected))
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size or 1.0)


def exact(actual: object, expected: object) -> tuple[float, float]:
    """Return (0, 0) where both are equal, else (inf, 0)."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return (0.0 if torch.equal(actual, expected) else math.inf), 0.0
    return (0.0 if actual == expected else math.inf), 0.0


def passes(results: Results) -> bool:
    """Return whether every error is within its tolerance; nan is not."""
    return all(error <= tolerance for error, tolerance in results.values())


def worst(results: Results) -> tuple[str, float, float]:
    """Return (quantity, error, tolerance) of the largest error over its tolerance."""

    def badness(item: tuple[str, tuple[float, float]]) -> float:
        error, tolerance = item[1]
        ratio = error / tolerance if tolerance else (0.0 if error == 0 else math.inf)
        return math.inf if math.isnan(ratio) else ratio

    name, (error, tolerance) = max(results.items(), key=badness)
    return name, error, tolerance


_UNNAMED_KINDS: dict[str, Callable[[Any], bool]] = {
    "attention_mask_examples": lambda m: isinstance(m, list) and "token_order" in m[0],
    "multi_anchor_sampler": lambda m: (
        isinstance(m, list) and {"video", "action", "params"} <= m[0].keys()
    ),
    "official_prompts": lambda m: isinstance(m, dict) and "embodiment_ids" in m,
    "official_view_layouts": lambda m: isinstance(m, dict) and all("|views=" in key for key in m),
}
