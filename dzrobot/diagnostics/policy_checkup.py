"""Why does a policy fail? Measurements from cheap to dear, until one names the cause.

Two things are kept apart: that something *differs* between training and acting, and that it
*matters* to this policy. Only what matters is a cause.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dzrobot.diagnostics.examination import CheckupLine, Examination, Step, Verdict, cause
from dzrobot.diagnostics.live_inputs import LiveInputs
from dzrobot.diagnostics.own_rows import Change, DataRow, Recording, own_rows
from dzrobot.diagnostics.policy_acting import replayed, tried
from dzrobot.diagnostics.policy_files import passport_faults
from dzrobot.files import write_json

ROWS = 24
"""Recorded rows that the policy is asked about."""

EXPECTED = 70
"""Plans and replays that follow where there is an environment, about."""

FEW_ROWS = 8
"""How many of them try what mends it."""

MATTERS = 1.4
"""Error with a live key over that with the recorded one from which the difference matters."""

MENDS = 0.75
"""Share of the error below which other statistics mend it."""


@dataclass(kw_only=True)
class PolicyCheckup(Examination):
    """The examination of a policy, step by step; see :meth:`run`."""

    def run(self) -> Iterator[CheckupLine]:
        """Yield what is measured; the first certain cause ends it.

        Raises:
            ConfigError: the policy acts beside its environment.
            DzrobotError: something cannot be read or made.
        """
        for step in (_files, _rows, _inputs, replayed, tried):
            self.verdict = yield from step(self)
            if self.verdict is not None:
                return
        self.verdict = _left(self)


def _files(look: Examination) -> Step:
    """Look at what checkpoint, dataset and environment say."""
    if look.misfit:
        yield look.line("files", "environment", look.misfit, differs=True, matters=True)
        return cause("the environment does not fit the policy", look.misfit)
    faults = list(passport_faults(look.found))
    for fault in faults:
        yield look.line("files", "passport", fault, differs=True, matters=True)
    if faults:
        return cause(
            "the files beside the weights are not those that the passport names",
            "; ".join(faults),
            "put back the experiment_cfg/metadata.json and tokenizer that it was trained with",
        )
    for one in look.files.said():
        matters = True if one.cause else None
        yield look.line("files", one.what, one.found, differs=one.differs, matters=matters)
        if one.cause:
            return cause(one.cause, one.found, one.change)
    if (match := look.statistics) is not None:
        yield look.line("files", "statistics", match.words, differs=match.differs)
    return None


def _rows(look: Examination) -> Step:
    """Ask whether the policy does its own data."""
    if look.recording is None:
        yield look.line("own rows", "", "not measured: give --dataset")
        return None
    rows = look.recording.sample(ROWS)
    own = look.own = own_rows(look.asked, rows, look.recording.every_action)
    yield look.line("own rows", "first action", own.words, differs=not own.does_its_data)
    few = rows[:: max(1, len(rows) // FEW_ROWS)]
    mended = yield from _with_own_statistics(look, look.recording, few)
    if own.does_its_data or mended is not None:
        return mended
    if own.otherwise:
        return None
    return (yield from _with_other_images(look, look.recording, few))


def _with_own_statistics(look: Examination, recording: Recording, rows: Sequence[DataRow]) -> Step:
    match, checkpoint = look.statistics, look.found.checkpoint
    if match is None or checkpoint is None or not match.differs or checkpoint.own_passport:
        # A passport says which statistics it was trained with, and these are they.
        return None
    before = own_rows(look.asked, rows, recording.every_action)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "metadata.json"
        write_json(file, {look.found.robot.tag: match.entry})
        tried = replace(look.found, checkpoint=replace(checkpoint, statistics=file))
        after = own_rows(look.load(tried), rows, recording.every_action)
    mends = after.does_its_data and after.share < MENDS * before.share
    words = f"with those of the data {after.share:.2f}, with its own {before.share:.2f}"
    yield look.line("own rows", "statistics", words, differs=match.differs, matters=mends)
    if not mends:
        return None
    return cause(
        match.cause,
        f"on training rows the policy has {before.share:.2f} of the mean action's error, and "
        f"{after.share:.2f} with statistics measured on the data ({match.words})",
        "put the statistics that it was trained with into experiment_cfg/metadata.json; "
        "`dzrobot stats` measures them",
    )


def _with_other_images(look: Examination, recording: Recording, rows: Sequence[DataRow]) -> Step:
    before = own_rows(look.asked, rows, recording.every_action)
    tried = {
        words: own_rows(look.asked, rows, recording.every_action, change)
        for words, change in _image_changes(look.found.robot.video_keys)
    }
    words = min(tried, key=lambda one: tried[one].share)
    best = tried[words]
    mends = best.does_its_data
    text = f"best with images {words}: {best.share:.2f} after {before.share:.2f}"
    yield look.line("own rows", "other images", text, differs=mends, matters=mends)
    if not mends:
        return None
    return cause(
        f"the policy's own side gives it images that are {words}",
        f"on training rows it has {before.share:.2f} of the mean action's error, and "
        f"{best.share:.2f} when it is given them {words}",
        "undo that where the policy reads its images",
    )


def _inputs(look: Examination) -> Step:
    """Compare live with recorded inputs, and exchange what differs, one key at a time."""
    live = _seen(look)
    if live is None:
        lacking = "--env or --recording" if look.recording is not None else "--dataset"
        yield look.line("inputs", "", f"not measured: give {lacking}")
        return None
    look.live, look.compared, found = live, list(live.compare()), {}
    for one in look.compared:
        words = f"{one.words or 'as recorded'} ({one.how})"
        yield look.line("inputs", one.key, words, differs=bool(one.words))
        if one.words:
            found[one.key] = one.words
    look.differences += _by_words(found)
    if not found or look.own is None or not look.own.does_its_data:
        return None
    ratios = {}
    for key in found:
        ratio = ratios[key] = live.swapped(look.asked, [key])
        words = f"{ratio:.2f} times the error when it is live"
        yield look.line("exchange", key, words, differs=True, matters=ratio >= MATTERS)
    named = [key for key in found if ratios[key] >= MATTERS] or list(found)
    ratio = live.swapped(look.asked, named)
    if ratio < MATTERS:
        return None
    return cause(
        "; ".join(f"{key} is live {found[key]}" for key in named),
        f"with {' and '.join(named)} as they are live, the plan's error is {ratio:.1f} times "
        "that with the recorded ones",
        "make the environment's observation, or what stands between it and the policy, what "
        "the data hold",
    )


def _by_words(found: Mapping[str, str]) -> list[str]:
    """Return in words what live inputs are; keys that differ alike have one reason, and are one."""
    keys: dict[str, list[str]] = {}
    for key, words in found.items():
        keys.setdefault(words, []).append(key)
    return [
        f"{' and '.join(same)} {'is' if len(same) == 1 else 'are'} live {words}"
        for words, same in keys.items()
    ]


def _seen(look: Examination) -> LiveInputs | None:
    if look.recording is None:
        return None
    if look.acted is not None:
        return LiveInputs.recorded(look.recording, look.acted, look.facts.hand)
    if look.bench is None:
        return None
    return LiveInputs.see(look.recording, look.episodes, look.bench, look.facts.hand)


def _left(look: Examination) -> Verdict:
    if look.acted is not None and look.recording is not None:
        return Verdict(
            sentence="No cause in what can be measured while nothing moves: files, own rows, "
            "first inputs and commands; whether recorded actions do again what they did, and "
            "the policy in the loop, was left out."
            + (f" What differs: {'; '.join(look.differences)}." if look.differences else ""),
            judged=look.own is not None,
        )
    given = {"--env": look.bench, "--dataset": look.recording}
    if lacking := [name for name, one in given.items() if one is None]:
        return Verdict(
            sentence="No cause in what could be measured; for the rest give "
            f"{' and '.join(lacking)}.",
            judged=look.own is not None,
        )
    if look.differences:
        each = "; ".join(look.differences)
        return Verdict(
            causes=tuple(look.differences[:2]),
            sentence=f"It fails, and this is all that differs: {each}; on recorded rows the plan "
            "hardly tells; undo one difference at a time and evaluate again.",
        )
    return Verdict(
        sentence="It fails, and nothing that was measured tells why: it does its data, its "
        "inputs are the recorded ones, and recorded actions do what they did.",
        judged=False,
    )


def _image_changes(keys: Sequence[str]) -> Iterator[tuple[str, Change]]:
    def over(change: Callable[[Any], Any]) -> Change:
        return lambda seen: {
            key: np.ascontiguousarray(change(value)) if key in keys else value
            for key, value in seen.items()
        }

    yield "upside down", over(lambda image: image[::-1])
    yield "turned by 180 degrees", over(lambda image: image[::-1, ::-1])
    yield "mirrored", over(lambda image: image[:, ::-1])
    yield "with red and blue exchanged", over(lambda image: image[..., ::-1])
    if len(keys) == 2:
        one, two = keys
        yield "of the other camera", lambda seen: {**seen, one: seen[two], two: seen[one]}
