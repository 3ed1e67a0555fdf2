"""What repeated actions, and a policy in the loop, tell of why it fails."""

from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from dzrobot.diagnostics.acting_trials import Start, Trials
from dzrobot.diagnostics.checkup import Finding, check_answers, check_motion, check_success
from dzrobot.diagnostics.commanded import check_commands
from dzrobot.diagnostics.conventions import UNCHANGED
from dzrobot.diagnostics.examination import CheckupLine, Examination, Step, Verdict, cause
from dzrobot.diagnostics.live_inputs import EPISODES
from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.diagnostics.own_rows import Recording
from dzrobot.diagnostics.policy_files import (
    adapter_words,
    answers_as,
    idle_rows,
    share_outside,
    usually,
)
from dzrobot.embodiments.spec import HOLD_ZERO, History
from dzrobot.modality.input_variants import fit_images
from dzrobot.rollout.evaluation.tables import FOREIGN
from dzrobot.rollout.policy_spec import PolicySpec

LONGEST = 300
"""Steps of an episode of which neither a recording nor its environment says how long it is."""

STARTS = 2
"""Starts that the policy acts from."""

MOSTLY = 0.75
"""Share of starts from which it succeeds, at least, where what differs does not matter."""

HARDLY = 0.1
"""Share of the recorded motion below which a robot hardly moves."""

HELD_STEPS = 10
"""Steps in which a hand that is held is watched."""

DRIFT_M = 0.01
"""Farthest that a hand may go meanwhile."""

SAME_END = 3.0
"""Difference of 255 below which two last images show the same."""

RECENT_FRAMES: History = "recent"

_LONGER = 2.5
"""How much longer than a recorded one an episode may last, at most as long as the environment's."""
_RATE = "frame rate"


def replayed(look: Examination) -> Step:
    """Repeat the recorded actions."""
    if look.acted is not None:
        return (yield from _commands(look, look.acted))
    fails_its_data = look.own is not None and not look.own.does_its_data
    if look.bench is None or look.recording is None or not look.episodes:
        yield look.line("replay", "", "not measured: give --env and --dataset")
        return weights(look) if fails_its_data else None
    if (drifts := (yield from _holding(look, look.bench))) is not None:
        return drifts
    findings, success = _repeated(look, look.bench)
    fails = success.verdict != "ok"
    named = [one for one in findings if one.verdict == "fail"]
    for one in named or findings[:1]:
        yield look.line(
            "replay", one.what, one.found, differs=bool(named), matters=fails and bool(named)
        )
    yield look.line("replay", success.what, success.found)
    if named and fails:
        more = "; ".join([*(one.found for one in named[1:]), success.found])
        what = "recorded actions mean something else than those of the environment"
        other = cause(f"{what} ({named[0].what})", more, named[0].found)
        if named[0].what != _RATE:
            return other
        # A policy that looks often enough may not mind.
        look.suspected = other
    look.differences += [f"{one.what}: {one.found}" for one in named]
    yield from _answered(look, look.bench)
    if success.verdict == "fail" and not fails_its_data:
        return (yield from _not_again(look, look.recording, look.bench, success.found))
    return weights(look) if fails_its_data else None


def _repeated(look: Examination, bench: Bench) -> tuple[list[Finding], Finding]:
    """Return what the motion of repeated actions tells, and whether they succeed again."""
    hand = look.facts.hand
    if _state_differs(look):
        # States that mean something else show another motion of the same actions.
        success = check_success(look.episodes, bench, UNCHANGED, look.noise)
        if success.verdict == "ok":
            return [], success
    if hand is None:
        return [], check_success(look.episodes, bench, UNCHANGED, look.noise)
    repair, findings = check_motion(look.episodes[:EPISODES], bench, hand, look.noise)
    return findings, check_success(look.episodes, bench, repair, look.noise)


def _answered(look: Examination, bench: Bench) -> Iterator[CheckupLine]:
    """Compare recorded actions, which the policy learned, with what was executed in their rows."""
    hand = look.facts.hand
    found = [] if hand is None else list(check_answers(look.episodes[:EPISODES], bench, hand))
    for one in found:
        yield look.line("replay", f"{one.what}, of the answer", one.found, differs=True)
    if found:
        what = "recorded actions mean something else than what was executed"
        words = "; ".join(one.found for one in found)
        look.differences.append(words)
        named = ", ".join(one.what for one in found)
        look.suspected = cause(f"{what} ({named})", words)


def _state_differs(look: Examination) -> bool:
    keys = look.found.robot.state_keys
    return any(one.words for one in look.compared if one.key in keys)


def _holding(look: Examination, bench: Bench) -> Step:
    """Look whether the hand stays where an episode begins while actions hold it there."""
    hand, robot = look.facts.hand, look.found.robot
    recording = look.episodes[0].recording
    if hand is None or _state_differs(look) or any(part.hold != HOLD_ZERO for part in robot.action):
        return None
    held = np.zeros((HELD_STEPS, robot.action_dim))
    held[:, hand.gripper] = recording.actions[0, hand.gripper]
    places = bench.states(recording, held)[:, hand.position]
    drift = float(np.linalg.norm(places - places[0], axis=1).max())
    words = f"the hand goes {1000 * drift:.1f} mm in {HELD_STEPS} steps that hold it"
    yield look.line("replay", "holding", words, differs=drift > DRIFT_M)
    if drift <= DRIFT_M:
        return None
    look.differences.append(words)
    again = check_success(look.episodes, bench, UNCHANGED, look.noise)
    yield look.line("replay", again.what, again.found, matters=again.verdict != "ok")
    if again.verdict == "ok":
        return None
    return cause(
        "the controller does not begin where the hand is: its goal at reset is another one",
        f"{words}, and {again.found}",
        "set the controller's goal to the hand's pose at reset, or record where it acts",
    )


def _not_again(look: Examination, recording: Recording, bench: Bench, evidence: str) -> Step:
    """Return why recorded actions do not succeed again, where their motion does not tell."""
    start = look.episodes[0]
    last = recording.length(recording.ordinal(start.number)) - 1
    (row,) = recording.rows(recording.ordinal(start.number), [last])
    (seen,) = bench.observations(start.recording, [last])
    robot = look.found.robot
    views = [
        {key: np.asarray(one[key], np.uint8) for key in robot.video_keys}
        for one in (row.observation, seen)
    ]
    fits = [fit_images(key, views[:1], views[1:], same_place=True) for key in robot.video_keys]
    apart = max((fit.as_is for fit in fits), default=0.0)
    same = apart <= SAME_END and all(
        np.allclose(row.observation[key], seen[key], atol=1e-2) for key in robot.state_keys
    )
    words = f"the last images are {apart:.1f} of 255 from the recorded ones"
    yield look.line("replay", "the end", words, differs=not same)
    if not same:
        return _unlike(evidence)
    return cause(
        "the environment never counts the success (`is_success` in its info)",
        f"{evidence}, although they end as they did: {words}",
        "set it where the goal holds, by the rule that the recording was made with",
    )


def _commands(look: Examination, acted: Recording) -> Step:
    """Compare what an arm did with what it was commanded; nothing moves."""
    recorded = {"of the data": look.recording, "of --recording": acted}
    hand, fails = look.facts.hand, list[str]()
    if hand is None:
        words = "not measured: give the --env of the arm, which says how it is commanded"
        yield look.line("commands", "", words)
    for whose, recording in recorded.items():
        if recording is None or hand is None:
            continue
        for one in check_commands(recording.vectors(), hand):
            fail = one.verdict == "fail"
            what = f"{one.what}, {whose}"
            yield look.line("commands", what, one.found, differs=fail, matters=fail or None)
            fails += [f"{what}: {one.found}"] if fail else []
    if fails:
        what = "recorded actions mean something else than those of the arm"
        return cause(what, "; ".join(fails))
    own = look.own
    return None if own is None or own.does_its_data else weights(look)


def _unlike(evidence: str) -> Verdict:
    """Return why recorded actions do not do again what they did, where no motion tells."""
    meaning = "recorded actions that mean something else than those of the environment"
    other = "another simulator, controller or start than was recorded"
    return Verdict(
        causes=(meaning, other),
        sentence=f"Either {meaning} or {other}: {evidence}, and the policy does its data; the "
        "environment's attribute `hand` (a HandMotion) lets this command compare the motion "
        "step by step, which tells.",
    )


def weights(look: Examination) -> Verdict:
    """Return why a policy does not do its data, where nothing else explains it."""
    own, match = look.own, look.statistics
    assert own is not None, "it was measured"
    evidence = f"on training rows it has {own.share:.2f} of the mean action's error"
    if own.otherwise:
        return cause(
            "the policy's actions mean something else than the data's",
            f"{evidence}, and does them once {own.otherwise}",
            "change that where the policy's actions are read, or in the data",
        )
    others = [one.found for one in look.files.said() if "trained" in one.what and one.differs]
    if match is not None and match.differs:
        others.append(f"its statistics are not of these data either ({match.words})")
    if others:
        return cause(
            "a checkpoint that was trained on other data",
            f"{evidence}, and {'; '.join(others)}",
            "give the checkpoint that was trained on these data, or these data's statistics",
        )
    base = "weights that were not trained on these data (base weights, another checkpoint)"
    adapter = "an adapter that was not loaded, or too little training"
    served = look.found.spec.server is not None
    # A server that was started for this policy serves what was asked for.
    if served and (answers := answers_as(look.card)):
        base = f"{base}, or another server than was meant: it says that it serves {answers}"
    if words := adapter_words(look.found):
        evidence = f"{evidence}; {words}"
    readable = served or look.found.checkpoint is not None
    more = ", and `dzrobot inspect` whether there is an adapter" if readable else ""
    return Verdict(
        causes=(base, adapter),
        sentence=f"Either {base}, or {adapter}: {evidence}, and what else was measured is "
        "right; run this command on the weights before fine-tuning: the same figure says that "
        f"training or adapter is missing{more}.",
    )


def tried(look: Examination) -> Step:
    """Let the policy act, and if it fails, with other options."""
    if look.acted is not None:
        yield from _recorded_acting(look, look.acted)
        return None
    if look.bench is None:
        yield look.line("acting", "", "not measured: give --env")
        return None
    trials = Trials(
        bench=look.bench, starts=_starts_of(look), count=look.counted,
        keys=look.found.robot.state_keys,
    )  # fmt: skip
    won, starts = trials.won(look.asked.policy), len(trials.starts)
    yield look.line("acting", "as it is", f"{won} of {starts} starts succeed")
    if trials.clipped:
        share = float(np.mean(trials.clipped))
        words = f"{100 * share:.1f} % of state numbers lie outside the statistics"
        yield look.line("acting", "clipped states", words, differs=share > FOREIGN)
    if 2 * won >= starts:
        return (yield from _succeeding(look, trials, won))
    return (
        look.suspected
        or (yield from _moves(look, trials))
        or (yield from _with_other_options(look, trials, won))
    )


def _succeeding(look: Examination, trials: Trials, won: int) -> Step:
    """Return what successes from ``won`` of the trials' starts say of what differs."""
    starts = len(trials.starts)
    if not look.differences:
        return Verdict(sentence=f"No cause: it succeeds from {won} of {starts} starts.")
    # Two successes may be luck.
    more = yield from _more_starts(look, trials)
    won, starts, what = won + more, 2 * starts, "; ".join(look.differences)
    if won >= MOSTLY * starts:
        said = f"No cause: it succeeds from {won} of {starts} starts"
        return Verdict(sentence=f"{said}; what differs does not matter: {what}.")
    return Verdict(
        sentence=f"It succeeds from {won} of {starts} starts, and something differs: {what}; "
        "`dzrobot eval` over more starts, with the difference and without it, tells whether that "
        "is why.",
        judged=False,
    )


def _recorded_acting(look: Examination, acted: Recording) -> Iterator[CheckupLine]:
    catalog = acted.reader.catalog
    stated = [catalog.facts[one].success for one in acted.numbers if one in catalog.facts]
    known = [one for one in stated if one is not None]
    words = f"{sum(known)} of {len(known)} recorded episodes succeeded; nothing was driven"
    yield look.line("acting", "as recorded", words)
    states = np.concatenate([acted.states(one) for one in acted.ordinals])
    share = share_outside(look.found, states)
    if share is not None:
        words = f"{100 * share:.1f} % of state numbers lie outside the statistics"
        yield look.line("acting", "clipped states", words, differs=share > FOREIGN)


def _moves(look: Examination, trials: Trials) -> Step:
    """Look whether a robot that fails moves at all, where its data begin with idle rows."""
    recording = look.recording
    if recording is None or not trials.reached:
        return None
    deviation = np.maximum(recording.every_state.std(0), 1e-6)
    far = [np.abs(one - one[0]).max(0) for one in map(recording.states, recording.ordinals)]
    share = float(np.median(np.stack(trials.reached) / deviation))
    share /= max(float(np.median(np.stack(far) / deviation)), 1e-6)
    words = f"it moves {100 * share:.0f} % as far as was recorded"
    hardly, rows = share < HARDLY, idle_rows(recording)
    yield look.line("acting", "motion", words, differs=hardly)
    if not hardly or rows < look.found.robot.timing.action_horizon:
        return None
    return cause(
        "the data begin with rows in which the robot stands still, and the policy learned that",
        f"{words}, and stands still in the first {rows} rows of a recorded episode",
        "leave these rows out (`dzrobot import-hdf5 --drop-idle`, or begin recordings later) "
        "and train again",
    )


def _with_other_options(look: Examination, trials: Trials, before: int) -> Step:
    """Let it act with other options; ``before`` of the trials' starts succeeded as it is."""
    if look.found.checkpoint is None:
        return None
    given, usual, starts = look.found.acting, usually(look.found), len(trials.starts)
    spec = look.found.spec
    # What differs is the likelier cause: only departures from what is usual are tried then.
    other = not look.differences
    tried: list[tuple[str, object, PolicySpec]] = [
        ("execute", rows, replace(spec, execute=rows))
        for rows in dict.fromkeys([usual.execute, *([1] if other else [])])
    ]
    tried += [
        ("history", frames, replace(spec, history=frames))
        for frames in dict.fromkeys([usual.history, *([RECENT_FRAMES] if other else [])])
    ]
    for name, value, acting in tried:
        held = given.execute if name == "execute" else given.history
        if value == held:
            continue
        won = trials.won(look.load(replace(look.found, spec=acting)).policy)
        better = 2 * won >= starts
        words = f"{won} of {starts} starts succeed with {value} instead of {held}"
        yield look.line("acting", name, words, differs=better, matters=better)
        if better:
            instead = f"--{name} {value}"
            if (verdict := (yield from _elsewhere(look, trials, before, instead))) is not None:
                return verdict
            return cause(
                f"how plans are executed: --{name} {held}",
                f"{won} of {starts} starts succeed with {value}",
                f"give --{name} {value}",
            )
    return None


def _elsewhere(look: Examination, trials: Trials, before: int, other: str) -> Step:
    """Let the policy act from other starts, before its options are blamed for failures of few."""
    more = yield from _more_starts(look, trials)
    won, all_ = before + more, 2 * len(trials.starts)
    if 2 * won < all_:
        return None
    return Verdict(
        sentence=f"No cause: it succeeds from {won} of {all_} starts, "
        f"and more of the first with {other}; `dzrobot eval`, and again with {other} and --against "
        "its results, tells over more starts whether that is better."
    )


def _more_starts(look: Examination, trials: Trials) -> Generator[CheckupLine, None, int]:
    """Let the policy act from as many other starts; return from how many it succeeds."""
    starts = _other_starts(look)
    more = replace(trials, starts=starts).won(look.asked.policy)
    yield look.line("acting", "other starts", f"{more} of {len(starts)} more starts succeed")
    return more


def _other_starts(look: Examination) -> list[Start]:
    """Return as many starts again: of further recorded episodes, then of seeds after theirs."""
    recorded = [_start_of(look, one) for one in look.episodes]
    free = max((one.seed for one in recorded), default=STARTS - 1) + 1
    longest = max((one.steps or 0 for one in recorded), default=0)
    steps = longest or look.most_steps or LONGEST
    fresh = [Start(seed=free + more, steps=steps) for more in range(STARTS)]
    return [*recorded[STARTS:], *fresh][:STARTS]


def _start_of(look: Examination, one: RecordedStart) -> Start:
    steps = int(_LONGER * len(one.recording.actions))
    steps = steps if look.most_steps is None else min(steps, look.most_steps)
    return Start(seed=one.recording.seed or 0, number=one.recording.start, steps=steps)


def _starts_of(look: Examination) -> list[Start]:
    found = [_start_of(look, one) for one in look.episodes[:STARTS]]
    return found or [Start(seed=seed, steps=look.most_steps or LONGEST) for seed in range(STARTS)]
