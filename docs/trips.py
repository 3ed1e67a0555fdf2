"""The generated parts of "How it works": the layers, and four trips through the code as it runs.

    python docs/trips.py            write docs/layers.svg and the outlines in docs/how-it-works.md
    python docs/trips.py --check    only report whether they are out of date (exit code 1)

Each trip runs under a profiler. A file counts when a function of it runs; imports do not. Nothing
here names a module of the package, so the script survives moves. It takes about a minute.
"""

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from html import escape
from multiprocessing import get_context
from pathlib import Path
from textwrap import wrap
from types import CodeType, FrameType
from typing import Any, Self

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-it-works.md"
PICTURE = ROOT / "docs" / "layers.svg"
PACKAGES = ("dzrobot", "envs", "policies", "training")
"""Folders whose files count. The latter three are ``dzrobot.envs`` and so on."""


@dataclass(frozen=True)
class Visit:
    """The first call into a file: how deep it is nested among such calls, and its function."""

    depth: int
    file: str
    function: str


@dataclass
class Trip:
    """What ran between entering and leaving this context, in this thread."""

    root: Path = ROOT
    visits: list[Visit] = field(default_factory=list)
    functions: set[tuple[str, str]] = field(default_factory=set)

    def __enter__(self) -> Self:
        self._names: dict[str, str | None] = {}
        self._stack: list[tuple[CodeType, bool]] = []
        self._importing = 0
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        # Neither leaves this process.
        self._names, self._stack = {}, []

    def _name(self, filename: str) -> str | None:
        """Return the path below the root without ``dzrobot/``, or None for others' files."""
        if filename not in self._names:
            path = Path(os.path.realpath(filename))
            inside = path.relative_to(self.root) if path.is_relative_to(self.root) else Path()
            own = inside.parts[:1] and inside.parts[0] in PACKAGES
            short = Path(*inside.parts[1:]) if inside.parts[:1] == ("dzrobot",) else inside
            self._names[filename] = short.as_posix() if own else None
        return self._names[filename]

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or (name := self._name(code.co_filename)) is None:
            return
        if code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif self._importing:
            return
        elif event == "return":
            if self._stack and self._stack[-1][0] is code:
                self._stack.pop()
        else:
            first = all(visit.file != name for visit in self.visits)
            function = code.co_qualname.partition(".<locals>")[0]
            if first:
                depth = sum(kept for _, kept in self._stack)
                self.visits.append(Visit(depth, name, function))
            self.functions.add((name, function))
            self._stack.append((code, first))

    def outline(self) -> str:
        """Return one line per file: indented function, then file."""
        names = [f"{'  ' * visit.depth}{visit.function}" for visit in self.visits]
        width = max(map(len, names)) + 2
        return "\n".join(
            f"{name:<{width}}{visit.file}" for name, visit in zip(names, self.visits, strict=True)
        )


def in_python() -> dict[str, Trip]:
    """Load the bundled policy, let it plan an action, and take a step of Lift."""
    import gymnasium as gym

    from dzrobot import DreamZeroPolicy, PolicyOptions, default_checkpoint

    env = gym.make("dzrobot/lift-v0", resolution=128, max_episode_steps=20)
    with Trip() as load:
        policy = DreamZeroPolicy.from_pretrained(
            default_checkpoint(), options=PolicyOptions(noise="keyed")
        )
    observation, _ = env.reset(seed=0)
    # The same whether or not this machine has embedded the instruction before.
    policy.prepare([observation[policy.embodiment.language]])
    policy.reset("default")
    with Trip() as act:
        action = policy.act(observation)
    with Trip() as step:
        env.step(action)
    env.close()
    return {"load": load, "act": act, "step": step}


def at_the_command_line() -> dict[str, Trip]:
    """Evaluate random actions for one short episode of the light environment."""
    from dzrobot.cli import main

    with tempfile.TemporaryDirectory() as folder:
        words = ["eval", "--env", "dzrobot/point-v0", "--policy", "random", "--episodes", "1"]
        words += ["--max-steps", "4", "--workers", "0", "--videos", "none"]
        words += ["--output", f"{folder}/results"]
        # Of the same form in a terminal as without one.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            Trip() as trip,
        ):
            main(words)
    return {"eval": trip}


def traced() -> dict[str, Trip]:
    """Run each program in a new process, so that nothing is loaded or cached beforehand."""
    programs: tuple[Callable[[], dict[str, Trip]], ...] = (in_python, at_the_command_line)
    found: dict[str, Trip] = {}
    for program in programs:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found |= pool.submit(program).result()
    return found


def layers() -> list[tuple[list[str], str]]:
    """Return the layers from top to bottom: members without ``dzrobot.``, and what they are.

    Neighboring layers of single modules are drawn as one.
    """
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in config["contracts"] if each["name"] == "Layers"]
    package = griffe.load("dzrobot", search_paths=[str(ROOT)], resolve_aliases=False)
    rows: list[tuple[list[str], str]] = []
    modules_above = False
    for layer in contract["layers"]:
        names = [name.strip().removeprefix("dzrobot.") for name in layer.split("|")]
        described = [name for name in names if package[name].is_init_module]
        texts = [_first_sentence(package[name]) for name in described]
        if modules_above and not described:
            rows[-1][0].extend(names)
        else:
            rows.append((names, " ".join(filter(None, texts))))
        modules_above = not described
    return rows


def _first_sentence(module: griffe.Object | griffe.Alias) -> str:
    text = module.docstring.value.partition("\n\n")[0] if module.docstring else ""
    return " ".join(re.sub(r"``?", "", text).split())


LEFT, COLUMN, LINE, TOP = 240, 150, 17, 72
"""Widths of the label and of a trip's column, heights of a line and of the heading, in pixels."""

COLORS = {"load": "#b35900", "act": "#00695c", "step": "#6a1b9a", "eval": "#1565c0"}


def picture(trips: dict[str, Trip], rows: Sequence[tuple[list[str], str]]) -> str:
    """Return the layers with the files that each trip enters, as SVG."""
    width = LEFT + COLUMN * len(trips) + 16
    cells = {
        (row, name): _stems(trip, members, [m for others, _ in rows for m in others])
        for row, (members, _) in enumerate(rows)
        for name, trip in trips.items()
    }
    parts, centers, y = [], [], TOP
    for row, (members, text) in enumerate(rows):
        labels = wrap(" | ".join(members) if text else ", ".join(members), 24)
        notes = wrap(text, 32)
        lines = max(len(labels) + len(notes), *(len(cells[row, name]) for name in trips))
        height = lines * LINE + 22
        fill = "#eef3f3" if row % 2 else "#f7f9f9"
        parts.append(
            f'<rect x="8" y="{y}" width="{width - 16}" height="{height - 6}" rx="6" '
            f'fill="{fill}" stroke="#c9d3d3"/>'
        )
        parts += _text(20, y + 22, labels, 'font-size="15" font-weight="600" fill="#111"')
        below = y + 22 + LINE * len(labels)
        parts += _text(20, below, notes, 'font-size="12" fill="#555"')
        centers.append(y + 18)
        y += height
    for number, (name, trip) in enumerate(trips.items()):
        x = LEFT + COLUMN * number + 12
        parts += _text(x - 6, 34, [name], f'font-size="17" font-weight="700" fill="{COLORS[name]}"')
        parts += _text(x - 6, 54, [f"{len(trip.visits)} files"], 'font-size="12" fill="#555"')
        entered = [row for row in range(len(rows)) if cells[row, name]]
        ends = f'x1="{x}" y1="{centers[entered[0]]}" x2="{x}" y2="{centers[entered[-1]]}"'
        parts.append(f'<line {ends} stroke="{COLORS[name]}" stroke-width="3"/>')
        for row in entered:
            parts.append(f'<circle cx="{x}" cy="{centers[row]}" r="6" fill="{COLORS[name]}"/>')
            where = centers[row] + 4
            parts += _text(x + 14, where, cells[row, name], 'font-size="12" fill="#222"')
    title = "Layers of dzrobot from top to bottom, and the files that four trips enter"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 4}" '
    head += f'font-family="system-ui, sans-serif" role="img" aria-label="{title}">'
    ground = f'<rect width="{width}" height="{y + 4}" rx="10" fill="#ffffff"/>'
    intro = _text(20, 34, ["Layers"], 'font-size="17" font-weight="700" fill="#222"')
    intro += _text(20, 54, ["each may import those below it"], 'font-size="12" fill="#555"')
    return "\n".join([head, ground, *intro, *parts, "</svg>"]) + "\n"


def _stems(trip: Trip, members: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the files of a trip in one layer as lines of text, in the order of their entry."""
    found: list[str] = []
    for visit in trip.visits:
        module = visit.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        fits = [name for name in known if f"{module}.".startswith(f"{name}.")]
        if fits and max(fits, key=len) in members:
            found.append(module.rpartition(".")[2])
    lines = wrap(", ".join(dict.fromkeys(found)), 19)
    return [*lines[:6], "..."] if len(lines) > 7 else lines


def _text(x: int, y: int, lines: Sequence[str], style: str) -> list[str]:
    return [
        f'<text x="{x}" y="{y + LINE * number}" {style}>{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]


def page(text: str, trips: dict[str, Trip]) -> str:
    """Return the page with every outline between its markers replaced.

    Raises:
        ValueError: the page lacks the markers of a trip.
    """
    for name, trip in trips.items():
        begin, end = f"<!-- {name}: written by docs/trips.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{PAGE.name} needs {begin} and {end} once")
        count = f"{len(trip.visits)} files, {len(trip.functions)} functions:"
        block = f"{begin}\n{count}\n\n```text\n{trip.outline()}\n```\n{end}"
        text = pattern.sub(block.replace("\\", r"\\"), text)
    return text


def main() -> None:
    """Write what is generated, or compare it with the files."""
    parser = argparse.ArgumentParser(description="Generate the trips of docs/how-it-works.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT))
    trips = traced()
    made = {PAGE: page(PAGE.read_text(), trips), PICTURE: picture(trips, layers())}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"out of date: {names}; run `python docs/trips.py`")
    for path in [] if check else stale:
        path.write_text(made[path])


if __name__ == "__main__":
    main()
