"""The page of an improvement: what every round cost, gained and lost, and how it fails first."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from dzrobot.errors import counted
from dzrobot.rollout.evaluation.comparison import Results, read_results
from dzrobot.rollout.evaluation.report import Score
from dzrobot.rollout.evaluation.studies.series import UNPERTURBED
from dzrobot.rollout.pages.content import film_of
from dzrobot.rollout.pages.write import RoundsPage, write_rounds_page
from dzrobot.training.improve.rounds import Round
from dzrobot.training.improve.steps import Improvement, done_file

PAGE_FILE = "improve.html"

FIRST_FAILURES = 3
"""Films of each evaluation that are shown."""

_COLUMNS = (
    "round", "kept", "success", "against the kept one", "p, corrected", "e", "episodes recorded",
    "success alone", "takeovers per episode", "robot, min", "person, min",
    "points per person minute", "forgotten",
)  # fmt: skip

_LEGEND = (
    "success: on the test starts, with the 95 % interval (Wilson). Against the kept one: the "
    "difference from the same starts, with the 95 % interval (Bonett and Price), and the starts "
    "won and lost. "
    "p: exact McNemar, times the most rounds. e: evidence of this round alone, valid whenever one "
    "looks. Success alone: recorded episodes that succeeded without help, of the policy that was "
    "kept before the round. Forgotten: the same difference elsewhere."
)


def write_rounds(improvement: Improvement) -> Path:
    """Write the page of an improvement, as far as it is, and return its path.

    Raises:
        DzrobotError: a result cannot be read, or the page cannot be written.
    """
    step = improvement.next_step()
    over = f"There is no further step: {improvement.why_over}."
    stands = over if step is None else f"Next, round {step.round}: {step.about}."
    kept = improvement.kept(improvement.settings.rounds + 1)
    stands += f" Kept: {improvement.checkpoint(kept)}."
    page = improvement.folder / PAGE_FILE
    write_rounds_page(
        page,
        RoundsPage(
            title="Rounds of improvement", sentence=stands, columns=_COLUMNS,
            rows=[*_rows(improvement)], legend=_LEGEND, sections=[*_sections(improvement)],
        ),
    )  # fmt: skip
    return page


def _rows(improvement: Improvement) -> Iterator[list[str]]:
    if (start := _tested(improvement, 0)) is not None:
        won = sum(bool(record.success) for record in start.finished.values())
        score = Score(successes=won, episodes=len(start.finished))
        yield ["start", "", _score(score), *[""] * (len(_COLUMNS) - 3)]
    for one in improvement.rounds.values():
        yield _row(one)


def _row(one: Round) -> list[str]:
    recorded, gained = one.recorded, one.points_per_person_minute
    return [
        str(one.number),
        "yes" if one.kept else "no",
        _score(one.test.after),
        f"{one.test.points}, {one.test.won} won, {one.test.lost} lost",
        f"{one.p:.2g}",
        f"{one.test.e:.3g}",
        str(recorded.episodes),
        str(recorded.alone),
        f"{recorded.takeovers_per_episode:.2f}",
        f"{recorded.robot_s / 60:.1f}",
        f"{recorded.person_s / 60:.1f}",
        "-" if gained is None else f"{gained:+.2f}",
        "; ".join(f"{other.name}: {other.points}" for other in one.forgotten) or "not measured",
    ]


def _score(score: Score) -> str:
    low, high = score.interval
    return f"{score.successes}/{score.episodes} ({low:.0%} to {high:.0%})"


def _sections(
    improvement: Improvement,
) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    for number in range(improvement.settings.rounds + 1):
        tested = _tested(improvement, number)
        if tested is None:
            continue
        failed = [name for name, record in tested.finished.items() if not record.success]
        heading = "The start" if number == 0 else f"Round {number}"
        lines = [improvement.rounds[number].why] if number in improvement.rounds else []
        lines.append(
            f"{counted(len(failed), 'failure')} of {len(tested.finished)}; the first ones:"
        )
        yield heading, lines, [*_films(improvement, tested, failed)]


def _films(
    improvement: Improvement, tested: Results, failed: list[str]
) -> Iterator[tuple[str, str]]:
    for name in failed[:FIRST_FAILURES]:
        film = film_of(tested.folder, tested.finished[name])
        if film is not None:
            place = os.path.relpath(film, improvement.folder)
            yield name, quote(place)


def _tested(improvement: Improvement, number: int) -> Results | None:
    """Return the evaluation of a round on the test starts; None until it is done."""
    place = improvement.place(number)
    is_done = done_file(place, "test").is_file()
    return read_results(place / UNPERTURBED) if is_done else None
