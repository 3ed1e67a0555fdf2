"""The protocol card: everything that can change a score, kept beside the results."""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from dzrobot.code_identity import CODE, CodeIdentity
from dzrobot.documents import read_json, read_json_lines, validated
from dzrobot.errors import ProtocolError, preview
from dzrobot.files import write_json, write_json_lines
from dzrobot.importing import load_reference
from dzrobot.registration import SUITES
from dzrobot.rollout.environment import IMAGE_ARGUMENTS, EnvironmentFacts, step_limit
from dzrobot.rollout.protocol import Count, EpisodeSpec, EvalSpec
from dzrobot.rollout.records import RECORDS_FILE, storing

CARD_FILE = "card.json"
CASES_FILE = "cases.jsonl"

REQUEST = "request"
"""Field of a card that says how to run the evaluation again."""

FORMAT = 1

_VERSIONS = (
    "gymnasium",
    "numpy",
    "torch",
    "transformers",
    "diffusers",
    "mujoco",
    "robosuite",
    "hf-libero",
)
_SHOWN = 12

OWN = "this program"
"""Who ran the code that a card names itself, and not within what a server says."""

_OTHER_CODE = (
    "Use another --output, or the code that the evaluation was begun by; or give "
    "--allow-other-code: the card then lists both, and tables say so."
)

_log = logging.getLogger(__name__)


class AssetsOfSuite(BaseModel):
    """How many files of a suite are the official ones, and which are not."""

    official: Count
    missing: list[str]
    altered: list[str]


@dataclass(frozen=True)
class MayDiffer:
    """A field of a card in which two results may differ that are compared."""

    on_request: bool = False
    """Only where that is what is compared."""

    mixed: bool = False
    """Also within one folder: results do not depend on it, or it is checked in its own way."""


class Card(BaseModel):
    """What is read of a card, and in what two may differ; the rest is compared, never used."""

    # Another version may write more fields: then the comparison names them.
    model_config = ConfigDict(extra="allow", frozen=True)

    format: Literal[1]
    protocol: str
    changes: Annotated[list[str], MayDiffer()]
    suites: dict[str, dict[str, Any]]
    policy: Annotated[dict[str, Any], MayDiffer()]
    versions: dict[str, str] = {}
    assets: dict[str, AssetsOfSuite]
    episodes: Count
    cases_sha256: str
    execution: Annotated[dict[str, Any] | None, MayDiffer(on_request=True)] = None
    perturbation: Annotated[dict[str, Any] | None, MayDiffer(on_request=True)] = None
    images: Annotated[dict[str, dict[str, Any]], MayDiffer()] = {}
    """By suite, the arguments that decide what images an environment delivers, which is a matter of
    the policy: starts, goals and motion are the same whatever they are."""

    request: Annotated[dict[str, Any] | None, MayDiffer(mixed=True)] = None
    """How to run the evaluation again; see `EvaluationRequest.of`."""


def may_differ(*requested: str) -> tuple[str, ...]:
    """Return the fields in which the cards of compared results may differ.

    Args:
        requested: Fields that are compared, of those that may differ on request alone.
    """
    found = []
    for name, known in Card.model_fields.items():
        for rule in known.metadata:
            if isinstance(rule, MayDiffer) and (not rule.on_request or name in requested):
                found.append(name)
    return tuple(found)


def build_card(
    spec: EvalSpec,
    cases: Sequence[EpisodeSpec],
    policy: Mapping[str, Any],
    arguments: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, EnvironmentFacts],
) -> dict[str, Any]:
    """Return the card of a run as plain values; the number of workers is not part of it.

    Args:
        spec: Episodes and rules.
        cases: Every episode that follows from it.
        policy: What its actions depend on.
        arguments: Keyword arguments of the environments beyond the task, by name.
        facts: What the environments say of themselves, by name.
    """
    protocol = spec.protocol
    card = {
        "format": FORMAT,
        "protocol": protocol.name,
        "changes": list(spec.changes),
        "suites": {suite: _suite(suite, cases, arguments, facts) for suite in _suites(cases)},
        "images": {
            suite: images
            for suite in _suites(cases)
            if (images := _images(suite, cases, arguments, facts))
        },
        "repeats": [
            {
                "suite": case.suite,
                "task_id": case.task_id,
                "episode": case.episode,
                "repeats_episode": case.repeat_of,
                "init_state_id": case.init_state_id,
            }
            for case in cases
            if case.repeat_of is not None
        ],
        "seed": spec.seed,
        "success": "the goal held at any step",
        "stop_at_success": protocol.stop_at_success,
        "policy": dict(policy),
        "assets": {suite: assets for suite in _suites(cases) if (assets := _assets(suite))},
        "versions": library_versions(facts.values()),
        "episodes": len(cases),
        "cases_sha256": _digest(cases),
    }
    plain: dict[str, Any] = json.loads(json.dumps(card))
    return plain


def keep_card(
    folder: Path,
    card: Mapping[str, Any],
    cases: Sequence[EpisodeSpec],
    *,
    allow_other_code: bool = False,
) -> dict[str, Any]:
    """Write ``card`` to ``folder``, or check that the one there is equal; return what is there.

    The caller holds the folder's lock: card and records are then of one run.

    Args:
        folder: The results folder.
        card: Of the run that goes on there.
        cases: Its episodes.
        allow_other_code: Whether results of other code may be there: the card then lists both.

    Raises:
        ProtocolError: the folder holds results of another protocol, or of other code; says what
            differs.
    """
    path = folder / CARD_FILE
    if path.exists() or path.is_symlink():
        held = read_card(folder)
        refuse_unlike(held, card, str(folder), "now")
        if not allow_other_code:
            refuse_other_code(held, card, str(folder), "now", _OTHER_CODE)
        kept = with_code_of(held, card)
        if kept != held:
            for who, (before, now) in other_code(held, card).items():
                _log.warning(
                    "%s holds results of %s, %s; now %s adds to them",
                    folder, who, listed(before), listed(now),
                )  # fmt: skip
            with storing(folder):
                write_json(path, kept, sort_keys=True)
        return kept
    if (folder / RECORDS_FILE).exists():
        raise ProtocolError(
            f"{folder} holds records without a {CARD_FILE}: nothing says of what. Use another "
            "--output, or move them away"
        )
    with storing(folder):
        write_json_lines(folder / CASES_FILE, map(asdict, cases))
        write_json(path, card, sort_keys=True)
    return read_card(folder)


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card of ``folder``.

    Raises:
        ProtocolError: there is none, or it is not a card.
    """
    path = folder / CARD_FILE
    if not folder.is_dir():
        raise ProtocolError(f"{folder} is not a folder: give the --output of an evaluation")
    if not path.exists() and not path.is_symlink():
        inside = sorted(each.parent for each in islice(folder.glob(f"*/{CARD_FILE}"), 100))
        several = f"; it holds several, give one of them: {preview(inside)}" if inside else ""
        raise ProtocolError(f"{folder} holds no evaluation: there is no {CARD_FILE} in it{several}")
    card = read_json(path, dict[str, Any], ProtocolError)
    validated(card, Card, str(path), ProtocolError)
    if CODE not in card:
        # Earlier versions named the version alone, among those of libraries.
        version = str(card.get("versions", {}).pop("dzrobot", "unknown version"))
        card[CODE] = [CodeIdentity(version=version).plain()]
    if "images" not in card:
        # Earlier versions listed them with the other arguments.
        card["images"] = {
            suite: images
            for suite, about in card["suites"].items()
            if (images := _taken(about.get("arguments", {}), IMAGE_ARGUMENTS))
        }
    return card


def _taken(arguments: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments called ``names``, which are removed."""
    return {name: arguments.pop(name) for name in names if name in arguments}


def read_cases(folder: Path) -> tuple[EpisodeSpec, ...]:
    """Return every episode of the run in ``folder``, run or not.

    Raises:
        ProtocolError: the list is missing, damaged, or not the one that the card speaks of.
    """
    path = folder / CASES_FILE
    cases = tuple(read_json_lines(path, EpisodeSpec, ProtocolError))
    if _digest(cases) != read_card(folder)["cases_sha256"]:
        raise ProtocolError(
            f"{path} is not the list of episodes that {CARD_FILE} speaks of; copy it again"
        )
    return cases


def refuse_unlike(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    here: str,
    there: str,
    advice: str = "Use another --output, or the same settings.",
) -> None:
    """Raise unless the two cards are equal, but for the code: see :func:`refuse_other_code`.

    Args:
        one: The first card, or its conditions.
        other: The second.
        here: Where the first is.
        there: Where the second is.
        advice: What to do, if no option of the second evaluation makes it like the first.

    Raises:
        ProtocolError: with one line per difference.
    """
    found = list(_differences(_conditions(one), _conditions(other), ""))
    if not found:
        return
    lines = [f"  {name}: {a} in {here}, {b} {there}" for name, a, b in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more")
    if options := alike(one, other):
        advice = f"{advice} Alike with: {' '.join(options)}"
    raise ProtocolError(
        "these results do not compare, so they are not mixed:\n" + "\n".join(lines) + f"\n{advice}"
    )


def unlike_beside(folder: Path, card: Mapping[str, Any]) -> str:
    """Return that the newest evaluation beside ``folder`` could not be compared, and how it could.

    Args:
        folder: Of an evaluation that begins.
        card: Of that evaluation.

    Returns:
        One line; empty where there is none of the same suites, or its conditions are the same.
    """
    beside = [path for path in folder.parent.glob(f"*/{CARD_FILE}") if path.parent != folder]
    for path in sorted(beside, key=_changed, reverse=True)[:_MOST_BESIDE]:
        try:
            other = read_card(path.parent)
        except ProtocolError:
            # What lies beside need not be whole for this evaluation to begin.
            continue
        if {*other["suites"]} == {*card["suites"]}:
            return _unlike(other, card, path.parent)
    return ""


_MOST_BESIDE = 50
"""Cards that are looked at: a folder of results may hold thousands."""


def _changed(path: Path) -> float:
    """Return when a file was written last; 0 where it has gone meanwhile."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any], here: Path) -> str:
    """Return in one line why the second evaluation does not compare with the first in ``here``."""
    left_out = may_differ()
    first, second = (
        _conditions({name: value for name, value in card.items() if name not in left_out})
        for card in (one, other)
    )
    found = [f"{name} ({a} there, {b} here)" for name, a, b in _differences(first, second, "")]
    if not found:
        return ""
    options = alike(one, other)
    advice = f"; alike with: {' '.join(options)}" if options else ""
    return f"note: will not compare with {here}, which differs in {preview(found, 2)}{advice}"


_OPTIONS = {
    "seed": "--seed", "max_steps": "--max-steps", "tasks": "--tasks", "protocol": "--protocol",
    "episodes_per_task": "--episodes",
}  # fmt: skip
"""Field of a card -> the option of `dzrobot eval` that decides it."""


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the options that give the second of two evaluations the conditions of the first."""
    pairs = [(one, other)] + [
        (about, other.get("suites", {}).get(suite))
        for suite, about in one.get("suites", {}).items()
    ]
    found = []
    for first, second in pairs:
        if not isinstance(second, Mapping):
            continue
        for name, option in _OPTIONS.items():
            value = first.get(name)
            if value != second.get(name) and value is not None:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                found.append(f"{option} {text}")
        given = first.get("arguments", {})
        for name, value in given.items():
            if value != second.get("arguments", {}).get(name):
                found.append(f"--env-arg {name}={value}")
    return list(dict.fromkeys(found))


def refuse_other_code(
    one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str, advice: str
) -> None:
    """Raise unless two cards are of the same code.

    Raises:
        ProtocolError: with the codes that differ.
    """
    found = other_code(one, other)
    if not found:
        return
    lines = [
        f"  {who}: {listed(before)} in {here}, {listed(now)} {there}"
        for who, (before, now) in found.items()
    ]
    raise ProtocolError(
        "these results are of different code, so they are not mixed:\n"
        + "\n".join(lines)
        + f"\n{advice}"
    )


Codes = tuple[CodeIdentity, ...]


def codes_of(card: Mapping[str, Any]) -> dict[str, Codes]:
    """Return the code that a card names, by who ran it: this program, and servers it asked.

    Raises:
        ProtocolError: the card's list is damaged.
    """
    return {
        who: validated(part[CODE], Codes, f"code of {who} on the card", ProtocolError)
        for who, part in _places(card).items()
        if CODE in part
    }


def own_code(card: Mapping[str, Any]) -> CodeIdentity:
    """Return the code of this program that a card names last."""
    return codes_of(card)[OWN][-1]


def other_code(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Codes, Codes]]:
    """Return the code on each of two cards, by who ran it, wherever ``other`` names more.

    A commit that changes documents alone is the same code.
    """
    before, now = codes_of(one), codes_of(other)
    return {
        who: (before.get(who, ()), codes)
        for who, codes in now.items()
        if not all(any(code.is_same(known) for known in before.get(who, ())) for code in codes)
    }


def with_code_of(card: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``card``, which lists the code of the other cards besides its own."""
    merged: dict[str, Any] = json.loads(json.dumps(card))
    for other in others:
        places = _places(merged)
        for who, (before, now) in other_code(merged, other).items():
            new = [code for code in now if not any(code.is_same(known) for known in before)]
            places[who][CODE] = [code.plain() for code in (*before, *new)]
    return merged


def _places(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a card that may name a code, by who ran it."""
    found = {OWN: card, "the policy's server": card.get("policy", {}).get("server")}
    for suite, about in card.get("suites", {}).items():
        found[f"the environment's server of {suite}"] = about.get("remote")
    return {who: part for who, part in found.items() if isinstance(part, Mapping)}


def _conditions(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a card says besides the code and how to run it again."""
    plain: dict[str, Any] = json.loads(json.dumps(card))
    for part in _places(plain).values():
        part.pop(CODE, None)
    for name, known in Card.model_fields.items():
        if any(isinstance(rule, MayDiffer) and rule.mixed for rule in known.metadata):
            plain.pop(name, None)
    return plain


def listed(codes: Codes) -> str:
    """Return codes as one text, for messages."""
    return " and ".join(code.text for code in codes) or "not recorded"


def card_digest(card: Mapping[str, Any]) -> str:
    """Return eight letters that tell cards apart; those of one evaluation by two codes are equal.

    An evaluation so finds its folder again, and says there that the code is another.
    """
    text = json.dumps(_conditions(card), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _differences(one: Any, other: Any, name: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            inner = f"{name}.{key}" if name else key
            absent = "nothing"
            if key not in one or key not in other:
                yield (
                    inner,
                    _short(one[key]) if key in one else absent,
                    _short(other[key]) if key in other else absent,
                )
            else:
                yield from _differences(one[key], other[key], inner)
    elif one != other:
        yield name, _short(one), _short(other)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suites(cases: Sequence[EpisodeSpec]) -> list[str]:
    return list(dict.fromkeys(case.suite for case in cases))


def _suite(
    suite: str,
    cases: Sequence[EpisodeSpec],
    arguments: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, EnvironmentFacts],
) -> dict[str, Any]:
    own = [case for case in cases if case.suite == suite]
    first = [case for case in own if case.task_id == own[0].task_id and case.repeat_of is None]
    seeded = first[0].init_state_id is None
    tasks, prompt = sorted({case.task_id for case in own}), facts[own[0].env].prompt
    return {
        "env": own[0].env,
        **_settings(arguments[own[0].env], facts[own[0].env]),
        **({} if prompt is None else {"prompt": prompt}),
        **_described(suite, tasks),
        "max_steps": own[0].max_steps or step_limit(own[0].env),
        "opengl": facts[own[0].env].opengl,
        "tasks": tasks,
        "episodes_per_task": len(first),
        "init_state_ids": "chosen by the seed" if seeded else _span(c.init_state_id for c in first),
        "seeds": _span(c.seed for c in first) if seeded else "keyed by seed, suite, task, episode",
    }


def _described(suite: str, tasks: Sequence[int]) -> dict[str, Any]:
    """Return what the suite itself says of the tasks to be run; it refuses those that cannot."""
    known = SUITES.get(suite)
    if known is None or known.describe is None:
        return {}
    found: dict[str, Any] = load_reference(known.describe, f"tasks of {suite}", Callable)(
        suite, tasks
    )
    return found


def tasks_by_axis(card: Mapping[str, Any]) -> dict[str, set[tuple[str, int]]]:
    """Return the tasks, as (suite, number), of every axis along which a card's suites are hard."""
    found: dict[str, set[tuple[str, int]]] = {}
    for suite, about in card["suites"].items():
        for axis, tasks in about.get("axes", {}).items():
            found.setdefault(axis, set()).update((suite, task) for task in tasks)
    return found


def _settings(arguments: Mapping[str, Any], facts: EnvironmentFacts) -> dict[str, Any]:
    """Return what an environment was made with.

    Of an arm that is all that its workcell comes to, and of a remote one what its server says.
    """
    if facts.remote is not None:
        return {"arguments": {}, "remote": dict(facts.remote)}
    if facts.workcell is not None:
        return {"arguments": {}, "workcell": dict(facts.workcell)}
    return {"arguments": {k: v for k, v in arguments.items() if k not in IMAGE_ARGUMENTS}}


def _images(
    suite: str,
    cases: Sequence[EpisodeSpec],
    arguments: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, EnvironmentFacts],
) -> dict[str, Any]:
    """Return what the images of a suite were made with; servers and workcells say it themselves."""
    env = next(case.env for case in cases if case.suite == suite)
    if facts[env].remote is not None or facts[env].workcell is not None:
        return {}
    return _taken(dict(arguments[env]), IMAGE_ARGUMENTS)


def _span(numbers: Iterator[int | None]) -> str:
    listed = list(numbers)
    return f"{listed[0]} to {listed[-1]}"


def _assets(suite: str) -> dict[str, Any]:
    """Return whether the files of a suite are the official ones; scores depend on it."""
    known = SUITES.get(suite)
    if known is None or known.assets is None:
        return {}
    found: dict[str, Any] = load_reference(known.assets, f"assets of {suite}", Callable)(suite)
    return found


def library_versions(facts: Iterable[EnvironmentFacts]) -> dict[str, str]:
    """Return the versions that a result depends on, of the libraries that are installed here."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    own = dict.fromkeys(name for one in facts for name in one.libraries)
    for name in (*_VERSIONS, *own):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _digest(cases: Sequence[EpisodeSpec]) -> str:
    text = json.dumps([asdict(case) for case in cases], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
