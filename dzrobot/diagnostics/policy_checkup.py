"""Why does a policy fail? Measurements from cheap to dear, until one names the cause.

Two things are kept apart: that something *differs* between training and acting, and that it
*matters* to this policy. Only what matters is a cause.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dzrobot.diagnostics.acting_trials import Start, Trials
from dzrobot.diagnostics.checkup import Finding, check_motion, check_success
from dzrobot.diagnostics.conventions import UNCHANGED
from dzrobot.diagnostics.live_inputs import EPISODES, Compared, LiveInputs
from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.diagnostics.own_rows import Asked, Change, DataRow, Recording, own_rows
from dzrobot.diagnostics.statistics_match import StatisticsMatch, match_statistics
from dzrobot.embodiments.spec import History
from dzrobot.errors import ConfigError
from dzrobot.files import write_json
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.options import ActingOptions
from dzrobot.recording.catalog import RATE_TOLERANCE
from dzrobot.rollout.environment import EnvironmentFacts
from dzrobot.rollout.evaluation.tables import FOREIGN
from dzrobot.rollout.policy_spec import PolicySpec, ResolvedPolicy, load_policy
from dzrobot.training.data.plan_errors import OwnRows

ROWS = 24
"""Recorded rows that the policy is asked about."""

LONGEST = 300
"""Steps of an episode of which neither a recording nor its environment says how long it is."""

EXPECTED = 70
"""Plans and replays that follow where there is an environment, about."""

FEW_ROWS = 8
"""How many of them try what mends it."""

MATTERS = 1.4
"""Error with a live key over that with the recorded one from which the difference matters."""

MENDS = 0.75
"""Share of the error below which other statistics mend it."""

STARTS = 2
"""Starts that the policy acts from."""

RECENT_FRAMES: History = "recent"

_LONGER = 1.6
_RATE = "frame rate"


@dataclass(frozen=True, kw_only=True)
class CheckupLine:
    """One line of the table."""

    step: str
    what: str
    found: str
    differs: bool | None = None
    """Whether training and acting differ; None: it does not say."""

    matters: bool | None = None
    """Whether that matters to this policy; None: it was not measured."""

    seconds: float = 0.0
    plans: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of it."""

    sentence: str
    """For a person: cause, evidence, what to change."""

    causes: tuple[str, ...] = ()
    """Empty: none was found; two cannot be told apart."""

    judged: bool = True
    """Whether enough was measured to say that there is no cause."""


Step = Generator[CheckupLine, None, Verdict | None]


@dataclass(kw_only=True)
class PolicyCheckup:
    """A policy, its data and its environment, examined step by step; see :meth:`run`."""

    found: ResolvedPolicy
    """The policy; its weights are read when they are needed."""

    recording: Recording | None
    """What it was trained on. None: what needs it is left out."""

    facts: EnvironmentFacts
    """What the environment says of itself."""

    bench: Bench | None
    """The environment. None: what needs it is left out."""

    episodes: Sequence[RecordedStart] = ()
    """The episodes of ``recording`` as they are repeated."""

    noise: float = 0.0
    """Deviation of what was added to executed actions, where the recording says so."""

    longest: int = LONGEST
    """Steps of an episode where no recording says it."""

    misfit: str = ""
    """Why what the environment shows cannot be given to the policy."""

    count: Callable[[], None] = lambda: None
    """Called once for every plan."""

    verdict: Verdict | None = field(default=None, init=False)
    """What came of it, after :meth:`run`."""

    own: OwnRows | None = field(default=None, init=False)
    """Plans beside recorded rows, once they were asked for."""

    live: LiveInputs | None = field(default=None, init=False)
    """What was seen while recorded actions were repeated, once they were."""

    compared: list[Compared] = field(default_factory=list, init=False)
    """The same, key by key."""

    _differences: list[str] = field(default_factory=list, init=False)
    _suspected: Verdict | None = field(default=None, init=False)
    _since: float = field(default_factory=time.perf_counter, init=False)
    _plans: int = field(default=0, init=False)
    _told: int = field(default=0, init=False)

    def run(self) -> Iterator[CheckupLine]:
        """Yield what is measured; the first certain cause ends it.

        Raises:
            ConfigError: the policy acts beside its environment.
            DzrobotError: something cannot be read or made.
        """
        steps = (self._files, self._rows, self._inputs, self._replay, self._acting)
        for step in steps:
            self.verdict = yield from step()
            if self.verdict is not None:
                return
        self.verdict = self._left()

    @cached_property
    def asked(self) -> Asked:
        """Return the policy, loaded; see :meth:`run`."""
        return self._load(self.found)

    def _load(self, found: ResolvedPolicy) -> Asked:
        from dzrobot.policies.dreamzero.policy import DreamZeroPolicy

        policy = load_policy(found)
        if policy is None:
            raise ConfigError(
                f"{found.spec.name} acts beside its environment and is given no observation: "
                "there is nothing to compare"
            )
        if isinstance(policy, DreamZeroPolicy):
            # It is asked about rows from within episodes, and the inputs are compared here.
            policy.first_look.skip()
        return Asked(policy, self._counted)

    def _counted(self) -> None:
        self._plans += 1
        self.count()

    def _files(self) -> Step:
        """Look at what checkpoint, dataset and environment say."""
        if self.misfit:
            yield self._line("files", "environment", self.misfit, differs=True, matters=True)
            return _cause("the environment does not fit the policy", self.misfit)
        faults = list(self._passport())
        for fault in faults:
            yield self._line("files", "passport", fault, differs=True, matters=True)
        if faults:
            return _cause(
                "the files beside the weights are not those that the passport names",
                "; ".join(faults),
                "put back the experiment_cfg/metadata.json and tokenizer that it was trained with",
            )
        yield from self._said()
        if (match := self._statistics) is not None:
            yield self._line("files", "statistics", match.words, differs=match.differs)
        return None

    def _passport(self) -> Iterator[str]:
        from dzrobot.policies.dreamzero.checkpoints.passport import differences, passport_for

        checkpoint, robot = self.found.checkpoint, self.found.robot
        if checkpoint is None:
            return
        statistics = Statistics.from_metadata(checkpoint.metadata_file, robot)
        wanted = replace(
            passport_for(robot, statistics, checkpoint.config), lora_alpha=checkpoint.lora_alpha
        )
        for what, held, other in differences(checkpoint.passport, wanted):
            yield f"{what}: trained with {str(held)[:12]}, now {str(other)[:12]}"

    def _said(self) -> Iterator[CheckupLine]:
        task, own = self.facts.task, self.found.robot.timing.control_hz
        if self.recording is not None:
            catalog = self.recording.reader.catalog
            if task is not None:
                known = task in catalog.tasks.values()
                words = f"{task!r} is {'' if known else 'not '}among the recorded ones"
                yield self._line("files", "instruction", words, differs=not known)
            yield self._rate("rate of the data", catalog.fps, own)
        if self.facts.control_hz is not None:
            yield self._rate("rate", self.facts.control_hz, own)
        if self.found.checkpoint is not None:
            given, usual = self.found.acting, self._usual
            for name, mine, theirs in (
                ("execute", given.execute, usual.execute),
                ("history", given.history, usual.history),
            ):
                words = f"{mine}, and {theirs} unless something is said"
                yield self._line("files", name, words, differs=mine != theirs)

    def _rate(self, what: str, there: float, own: float) -> CheckupLine:
        other = abs(there - own) > RATE_TOLERANCE * own
        words = f"{there:g} per second, the policy's robot has {own:g}"
        return self._line("files", what, words, differs=other)

    @property
    def _usual(self) -> ActingOptions:
        return replace(self.found, spec=replace(self.found.spec, execute=None, history=None)).acting

    @cached_property
    def _statistics(self) -> StatisticsMatch | None:
        if self.found.checkpoint is None or self.recording is None:
            return None
        return match_statistics(self.found.checkpoint, self.recording.reader)

    def _rows(self) -> Step:
        """Ask whether the policy does its own data."""
        if self.recording is None:
            yield self._line("own rows", "", "not measured: give --dataset")
            return None
        rows = self.recording.sample(ROWS)
        own = self.own = own_rows(self.asked, rows, self.recording.every_action)
        yield self._line("own rows", "first action", own.words, differs=not own.does_its_data)
        few = rows[:: max(1, len(rows) // FEW_ROWS)]
        mended = yield from self._with_own_statistics(self.recording, few)
        if own.does_its_data or mended is not None:
            return mended
        if own.otherwise:
            return None
        return (yield from self._with_other_images(self.recording, few))

    def _with_own_statistics(self, recording: Recording, rows: Sequence[DataRow]) -> Step:
        match, checkpoint = self._statistics, self.found.checkpoint
        if match is None or checkpoint is None or not match.differs or checkpoint.own_passport:
            # A passport says which statistics it was trained with, and these are they.
            return None
        before = own_rows(self.asked, rows, recording.every_action)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "metadata.json"
            write_json(file, {self.found.robot.tag: match.entry})
            tried = replace(self.found, checkpoint=replace(checkpoint, statistics=file))
            after = own_rows(self._load(tried), rows, recording.every_action)
        mends = after.does_its_data and after.share < MENDS * before.share
        words = f"with those of the data {after.share:.2f}, with its own {before.share:.2f}"
        yield self._line("own rows", "statistics", words, differs=match.differs, matters=mends)
        if not mends:
            return None
        return _cause(
            match.cause,
            f"on training rows the policy has {before.share:.2f} of the mean action's error, and "
            f"{after.share:.2f} with statistics measured on the data ({match.words})",
            "put the statistics that it was trained with into experiment_cfg/metadata.json; "
            "`dzrobot stats` measures them",
        )

    def _with_other_images(self, recording: Recording, rows: Sequence[DataRow]) -> Step:
        before = own_rows(self.asked, rows, recording.every_action)
        tried = {
            words: own_rows(self.asked, rows, recording.every_action, change)
            for words, change in _image_changes(self.found.robot.video_keys)
        }
        words = min(tried, key=lambda one: tried[one].share)
        best = tried[words]
        mends = best.does_its_data
        text = f"best with images {words}: {best.share:.2f} after {before.share:.2f}"
        yield self._line("own rows", "other images", text, differs=mends, matters=mends)
        if not mends:
            return None
        return _cause(
            f"the policy's own side gives it images that are {words}",
            f"on training rows it has {before.share:.2f} of the mean action's error, and "
            f"{best.share:.2f} when it is given them {words}",
            "undo that where the policy reads its images",
        )

    def _inputs(self) -> Step:
        """Compare live with recorded inputs, and exchange what differs, one key at a time."""
        if self.bench is None or self.recording is None:
            lacking = "--env" if self.bench is None else "--dataset"
            yield self._line("inputs", "", f"not measured: give {lacking}")
            return None
        live = LiveInputs.see(self.recording, self.episodes, self.bench, self.facts.hand)
        self.live, self.compared, found = live, list(live.compare()), {}
        for one in self.compared:
            words = f"{one.words or 'as recorded'} ({one.how})"
            yield self._line("inputs", one.key, words, differs=bool(one.words))
            if one.words:
                found[one.key] = one.words
        self._differences += [f"{key} is live {words}" for key, words in found.items()]
        if not found or self.own is None or not self.own.does_its_data:
            return None
        ratios = {}
        for key in found:
            ratio = ratios[key] = live.swapped(self.asked, [key])
            words = f"{ratio:.2f} times the error when it is live"
            yield self._line("exchange", key, words, differs=True, matters=ratio >= MATTERS)
        named = [key for key in found if ratios[key] >= MATTERS] or list(found)
        ratio = live.swapped(self.asked, named)
        if ratio < MATTERS:
            return None
        return _cause(
            "; ".join(f"{key} is live {found[key]}" for key in named),
            f"with {' and '.join(named)} as they are live, the plan's error is {ratio:.1f} times "
            "that with the recorded ones",
            "make the environment's observation, or what stands between it and the policy, what "
            "the data hold",
        )

    def _replay(self) -> Step:
        """Repeat the recorded actions."""
        fails_its_data = self.own is not None and not self.own.does_its_data
        if self.bench is None or not self.episodes:
            yield self._line("replay", "", "not measured: give --env and --dataset")
            return self._weights() if fails_its_data else None
        repair, findings = UNCHANGED, list[Finding]()
        if self.facts.hand is not None:
            first = self.episodes[:EPISODES]
            repair, findings = check_motion(first, self.bench, self.facts.hand, self.noise)
        success = check_success(self.episodes, self.bench, repair, self.noise)
        fails = success.verdict != "ok"
        named = [one for one in findings if one.verdict == "fail"]
        for one in named or findings[:1]:
            yield self._line(
                "replay", one.what, one.found, differs=bool(named), matters=fails and bool(named)
            )
        yield self._line("replay", success.what, success.found, differs=None, matters=None)
        if named and fails:
            more = "; ".join([*(one.found for one in named[1:]), success.found])
            what = "recorded actions mean something else than those of the environment"
            cause = _cause(f"{what} ({named[0].what})", more, named[0].found)
            if named[0].what != _RATE:
                return cause
            # A policy that looks often enough may not mind.
            self._suspected = cause
        self._differences += [f"{one.what}: {one.found}" for one in named]
        if success.verdict == "fail" and not fails_its_data:
            return self._unlike(success.found)
        return self._weights() if fails_its_data else None

    def _unlike(self, evidence: str) -> Verdict:
        """Return why recorded actions do not do again what they did, where no motion tells."""
        meaning = "recorded actions that mean something else than those of the environment"
        other = "another simulator, controller or start than was recorded"
        return Verdict(
            causes=(meaning, other),
            sentence=f"Either {meaning} or {other}: {evidence}, and the policy does its data; the "
            "environment's attribute `hand` (a HandMotion) lets this command compare the motion "
            "step by step, which tells.",
        )

    def _weights(self) -> Verdict:
        """Return why a policy does not do its data, where nothing else explains it."""
        own, match = self.own, self._statistics
        assert own is not None, "it was measured"
        evidence = f"on training rows it has {own.share:.2f} of the mean action's error"
        if own.otherwise:
            return _cause(
                "the policy's actions mean something else than the data's",
                f"{evidence}, and does them once {own.otherwise}",
                "change that where the policy's actions are read, or in the data",
            )
        if match is not None and match.differs:
            return _cause(
                "a checkpoint that was trained on other data",
                f"{evidence}, and its statistics are not of these data either ({match.words})",
                "give the checkpoint that was trained on these data, or these data's statistics",
            )
        weights = "weights that were not trained on these data (base weights, another checkpoint)"
        adapter = "an adapter that was not loaded, or too little training"
        return Verdict(
            causes=(weights, adapter),
            sentence=f"Either {weights} or {adapter}: {evidence}, and what else was measured is "
            "right; run this command on the weights before fine-tuning: the same figure says that "
            "training or adapter is missing, and `dzrobot inspect` whether there is an adapter.",
        )

    def _acting(self) -> Step:
        """Let the policy act, and if it fails, with other options."""
        if self.bench is None:
            yield self._line("acting", "", "not measured: give --env")
            return None
        trials = Trials(bench=self.bench, starts=self._starts, count=self._counted)
        won, all_ = trials.won(self.asked.policy), len(self._starts)
        yield self._line("acting", "as it is", f"{won} of {all_} starts succeed")
        if trials.clipped:
            share = float(np.mean(trials.clipped))
            words = f"{100 * share:.1f} % of state numbers lie outside the statistics"
            yield self._line("acting", "clipped states", words, differs=share > FOREIGN)
        if 2 * won >= all_:
            harmless = "; ".join(self._differences)
            more = f"; what differs does not matter: {harmless}" if harmless else ""
            return Verdict(sentence=f"No cause: it succeeds from {won} of {all_} starts{more}.")
        return self._suspected or (yield from self._with_other_options(trials))

    def _with_other_options(self, trials: Trials) -> Step:
        if self.found.checkpoint is None:
            return None
        given, usual, starts = self.found.acting, self._usual, len(self._starts)
        spec = self.found.spec
        tried: list[tuple[str, object, PolicySpec]] = [
            ("execute", rows, replace(spec, execute=rows))
            for rows in dict.fromkeys([usual.execute, 1])
        ]
        tried += [
            ("history", frames, replace(spec, history=frames))
            for frames in dict.fromkeys([usual.history, RECENT_FRAMES])
        ]
        for name, value, other in tried:
            held = given.execute if name == "execute" else given.history
            if value == held:
                continue
            won = trials.won(self._load(replace(self.found, spec=other)).policy)
            better = 2 * won >= starts
            words = f"{won} of {starts} starts succeed with {value} instead of {held}"
            yield self._line("acting", name, words, differs=better, matters=better)
            if better:
                return _cause(
                    f"how plans are executed: --{name} {held}",
                    f"{won} of {starts} starts succeed with {value}",
                    f"give --{name} {value}",
                )
        return None

    @cached_property
    def _starts(self) -> list[Start]:
        found = []
        for one in self.episodes[:STARTS]:
            steps = int(_LONGER * len(one.recording.actions))
            seed = one.recording.seed or 0
            found.append(Start(seed=seed, number=one.recording.start, steps=steps))
        return found or [Start(seed=seed, steps=self.longest) for seed in range(STARTS)]

    def _left(self) -> Verdict:
        given = {"--env": self.bench, "--dataset": self.recording}
        if lacking := [name for name, one in given.items() if one is None]:
            return Verdict(
                sentence="No cause in what could be measured; for the rest give "
                f"{' and '.join(lacking)}.",
                judged=self.own is not None,
            )
        if self._differences:
            each = "; ".join(self._differences)
            return Verdict(
                causes=tuple(self._differences[:2]),
                sentence=f"It fails, and what differs seemed harmless: {each}; undo one of them at "
                "a time and evaluate again.",
            )
        return Verdict(
            sentence="It fails, and nothing that was measured tells why: it does its data, its "
            "inputs are the recorded ones, and recorded actions do what they did.",
            judged=False,
        )

    def _line(
        self, step: str, what: str, found: str, *, differs: bool | None = None,
        matters: bool | None = None,
    ) -> CheckupLine:  # fmt: skip
        """Return a line, with the time and the plans since the last one."""
        now = time.perf_counter()
        line = CheckupLine(
            step=step, what=what, found=found, differs=differs, matters=matters,
            seconds=now - self._since, plans=self._plans - self._told,
        )  # fmt: skip
        self._since, self._told = now, self._plans
        return line


def _cause(cause: str, evidence: str, change: str = "") -> Verdict:
    parts = [f"{cause[0].upper()}{cause[1:]}: {evidence}", *([change] if change else [])]
    return Verdict(causes=(cause,), sentence=f"{'; '.join(parts)}.")


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
