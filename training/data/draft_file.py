"""The Python file of a drafted robot, with evidence and questions, and its contact sheet."""

import base64
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import MAX_ACTION_DIM, MAX_STATE_DIM, Embodiment
from dzrobot.errors import DatasetError
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.media import encode_png
from dzrobot.rollout.pages.write import SheetEpisode, SheetPlot, plotted, write_sheet
from dzrobot.training.data.columns import Progress
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.draft import DraftAction, DraftPart, RobotDraft

NAME = "ROBOT"
"""What the file calls the robot."""

_WIDTH = 96


def robot_file(draft: RobotDraft, tag: str) -> str:
    """Return the content of ``robot.py``.

    What is open and needed stands there as ``undecided(...)``, which is refused when the file is
    loaded; what is open and not needed at once is left out, and refused by name where it is used.
    """
    template = draft.template or "PROMPT"
    names = ["Embodiment", "Gripper", "Part", "View", "undecided"]
    body = [
        f'"""The robot {tag}, drafted by `dzrobot init-robot`: read it, then it is yours."""',
        "",
    ]
    code = list(_robot(draft, tag, template))
    text = "\n".join(code)
    used = [name for name in names if re.search(rf"\b{name}\(", text)]
    imports = [f"from dzrobot.embodiments.spec import {', '.join(used)}"]
    if draft.template:
        imports.append(f"from dzrobot.embodiments.templates import {draft.template}")
    imports.append("from dzrobot.embodiments.timing import Timing")
    prompt = [] if draft.template else ["", _prompt(draft.prompt)]
    asked = [
        line
        for number, one in enumerate(draft.questions, 1)
        for line in _comment(f"{number}. {one}")
    ]
    questions = ["", "# Questions that the data do not answer:", *asked] if asked else []
    return "\n".join([*body, *imports, *questions, *prompt, "", text, ""])


def _prompt(prompt: str) -> str:
    pieces = textwrap.wrap(prompt, 84, drop_whitespace=False, break_long_words=False)
    lines = "\n".join(f"    {piece!r}" for piece in pieces)
    return f"PROMPT = (\n{lines}\n)"


def _robot(draft: RobotDraft, tag: str, template: str) -> Iterator[str]:
    yield from _comment(
        f"Measured on {draft.rows:,} rows of {draft.episodes} episodes, "
        f"{draft.lengths[0]} to {draft.lengths[1]} rows long."
    )
    if draft.unused:
        yield from _comment(f"Columns that nothing here reads: {', '.join(draft.unused)}.")
    yield f"{NAME} = Embodiment("
    yield f"    tag={tag!r},"
    yield from _views(draft)
    yield from _state(draft)
    yield from _actions(draft)
    yield "    # Rows of the picture that the network sees, from the top; None is black."
    yield f"    tiles={_tiles(draft)},"
    yield f"    prompt={template},"
    yield from _timing(draft)
    yield ")"


def _views(draft: RobotDraft) -> Iterator[str]:
    if not draft.views:
        yield f"    views={_undecided('views: which column holds pictures?')},"
        return
    yield from _comment(
        "Resolution as info.json says it; size is what the network sees, and yours to choose.", 4
    )
    yield "    views=("
    for view in draft.views:
        yield f"        View(key={'video.' + view.name!r}, feature={view.column!r},"
        yield f"             resolution={view.resolution}, size={view.size}),"
    yield "    ),"


def _state(draft: RobotDraft) -> Iterator[str]:
    width = sum(len(part.numbers) for part in draft.state)
    if width > MAX_STATE_DIM:
        yield f"    state={_too_wide('state', width, MAX_STATE_DIM)},"
        return
    yield "    state=("
    for part in draft.state:
        yield from _comment(_names(part), 8)
        yield f"        Part(key={'state.' + part.name!r}, {_place(part)}),"
    yield "    ),"


def _actions(draft: RobotDraft) -> Iterator[str]:
    width = sum(len(one.part.numbers) for one in draft.action)
    for one in draft.left_out:
        yield from _comment(
            f"action.{one.part.name} is left out: its {len(one.part.numbers)} numbers never change "
            f"in {draft.rows:,} rows, and all together are more than the {MAX_ACTION_DIM} of a "
            "network. Whoever drives the robot sends them.", 4,
        )  # fmt: skip
    if width > MAX_ACTION_DIM:
        yield f"    action={_too_wide('action', width, MAX_ACTION_DIM)},"
        return
    yield "    action=("
    for one in draft.action:
        yield from _comment(_names(one.part), 8)
        for line in one.evidence:
            yield from _comment(line, 8)
        yield from _part(one)
    yield "    ),"


def _part(one: DraftAction) -> Iterator[str]:
    part = one.part
    yield "        Part("
    yield f"            key={'action.' + part.name!r}, {_place(part)},"
    if one.pair is not None:
        yield from _comment(
            "Predicted as the difference from the state at the start of a plan.", 12
        )
        yield f"            reference={'state.' + one.pair.name!r},"
    if one.gripper is not None:
        index, low, high = one.gripper
        middle = (low + high) / 2
        values = f"threshold={middle:g}, low={low:g}, high={high:g}"
        yield f"            gripper=Gripper(index={index}, {values}),"
    if one.hold is not None:
        yield f"            hold={one.hold!r},"
    else:
        yield from _comment(
            "hold is open: what keeps this part as it is? Refused where a robot waits.", 12
        )
    yield "        ),"


def _timing(draft: RobotDraft) -> Iterator[str]:
    yield from _comment(draft.rate_evidence + ".", 4)
    seconds = f" ({draft.horizon / draft.rate:.2g} s)" if draft.rate else ""
    yield from _comment(
        f"{draft.horizon} actions a plan{seconds} and {draft.blocks} plans a sample are a choice, "
        f"which needs {draft.horizon * draft.blocks + 1} rows of an episode.", 4,
    )  # fmt: skip
    rate = f"{draft.rate:g}" if draft.rate else _undecided(f"control_hz: {draft.rate_evidence}")
    blocks = f"action_horizon={draft.horizon}, blocks={draft.blocks}"
    yield f"    timing=Timing(control_hz={rate}, {blocks}),"


def _place(part: DraftPart) -> str:
    start = "" if part.whole else f", start={part.start}"
    return f"feature={part.column!r}, dim={len(part.numbers)}{start}"


def _names(part: DraftPart) -> str:
    if part.numbers[0].isdigit():
        return "The dataset does not name these numbers."
    return ", ".join(part.numbers)


def _tiles(draft: RobotDraft) -> str:
    rows = [tuple(None if name is None else f"video.{name}" for name in row) for row in draft.tiles]
    return repr(tuple(rows))


def _too_wide(what: str, width: int, most: int) -> str:
    return _undecided(f"{what}: {width} numbers, the network takes {most}")


def _undecided(question: str) -> str:
    return f"undecided({question!r})"


def _comment(text: str, indent: int = 0) -> Sequence[str]:
    # A name in a dataset is a text from outside: no line of it may leave the comment.
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    lead = " " * indent + "# "
    return textwrap.wrap(plain, _WIDTH, initial_indent=lead, subsequent_indent=lead) or [
        lead.rstrip()
    ]


_SHEET_EPISODES = 6
_MOST_LINES = 14
_MOST_POINTS = 400


def draw_sheet(catalog: DatasetCatalog, robot: Embodiment, page: Path, progress: Progress) -> int:
    """Write the contact sheet of a dataset to ``page``; return how many episodes it shows.

    Raises:
        DatasetError: No episode has its pictures, or ``page`` cannot be written.
    """
    lacking = catalog.missing([view.feature for view in robot.views])
    reader = DatasetReader(
        catalog, robot, ReaderOptions(damaged="count", empty="count", episodes="all")
    )
    there = [
        n
        for n in range(len(catalog.episodes))
        if n not in lacking and n not in reader.columns.faults
    ]
    chosen = (
        [
            there[i]
            for i in np.unique(np.linspace(0, len(there) - 1, _SHEET_EPISODES).round().astype(int))
        ]
        if there
        else []
    )
    shown, faults = [], []
    for done, ordinal in enumerate(chosen, 1):
        try:
            shown.append(_sheet_episode(reader, ordinal))
        except DatasetError as error:
            faults.append(str(error))
        progress(done, len(chosen))
    if not shown:
        raise DatasetError(faults[0] if faults else "no episode has all its pictures")
    write_sheet(page, f"{robot.tag}: {catalog.root.name}", shown)
    return len(shown)


def _sheet_episode(reader: DatasetReader, ordinal: int) -> SheetEpisode:
    length = int(reader.catalog.episodes.length[ordinal])
    rows = [0, length // 2, length - 1]
    pictures = {}
    for view in reader.embodiment.views:
        clip = reader.frames(ordinal, reader.resolution.views[view.key], rows)
        small = [
            image[:: max(1, image.shape[0] // 240), :: max(1, image.shape[0] // 240)]
            for image in clip
        ]
        pictures[view.name] = [
            (row, base64.b64encode(encode_png(np.ascontiguousarray(image))).decode())
            for row, image in zip(rows, small, strict=True)
        ]
    return SheetEpisode(
        number=int(reader.catalog.episodes.index[ordinal]),
        instruction=reader.instruction(ordinal, 0, 0.0), pictures=pictures,
        plots=_plots(reader, ordinal),
    )  # fmt: skip


def _plots(reader: DatasetReader, ordinal: int) -> Mapping[str, SheetPlot]:
    at = slice(*reader.catalog.episodes.offset[ordinal : ordinal + 2].tolist())
    kinds: dict[str, list[tuple[str, NDArray[np.float32]]]] = {}
    for key, source in reader.resolution.vectors.items():
        kind, _, name = key.partition(".")
        values = reader.columns.vector(source.column)[at, source.start : source.stop]
        kinds.setdefault(name, []).append((kind, values[:: -(-len(values) // _MOST_POINTS)]))
    return {name: _plot(found) for name, found in kinds.items()}


def _plot(found: Sequence[tuple[str, NDArray[np.float32]]]) -> SheetPlot:
    return plotted([(kind, column) for kind, values in found for column in values.T[:_MOST_LINES]])
