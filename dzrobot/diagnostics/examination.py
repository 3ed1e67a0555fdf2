"""A policy, its data and its environment, examined together: what is known so far."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dzrobot.diagnostics.live_inputs import Compared, LiveInputs
from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.diagnostics.own_rows import Asked, Recording
from dzrobot.diagnostics.policy_files import Files
from dzrobot.diagnostics.statistics_match import StatisticsMatch, match_statistics
from dzrobot.errors import ConfigError
from dzrobot.rollout.environment import EnvironmentFacts
from dzrobot.rollout.policy_spec import ResolvedPolicy, load_policy
from dzrobot.training.data.plan_errors import OwnRows


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
class Examination:
    """A policy, its data and its environment, and what was found of them."""

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

    most_steps: int | None = None
    """Steps after which an episode is over; None: it is not known."""

    acted: Recording | None = None
    """What was recorded where the policy acts, an arm for example: then nothing is driven."""

    misfit: str = ""
    """Why what the environment shows cannot be given to the policy."""

    count: Callable[[], None] = lambda: None
    """Called once for every plan."""

    verdict: Verdict | None = field(default=None, init=False)
    """What came of it, once it is over."""

    own: OwnRows | None = field(default=None, init=False)
    """Plans beside recorded rows, once they were asked for."""

    live: LiveInputs | None = field(default=None, init=False)
    """What was seen while recorded actions were repeated, once they were."""

    compared: list[Compared] = field(default_factory=list, init=False)
    """The same, key by key."""

    differences: list[str] = field(default_factory=list, init=False)
    """What differs between training and acting, in words."""

    suspected: Verdict | None = field(default=None, init=False)
    """A cause, should the policy fail where it acts."""

    _since: float = field(default_factory=time.perf_counter, init=False)
    _plans: int = field(default=0, init=False)
    _told: int = field(default=0, init=False)

    @cached_property
    def asked(self) -> Asked:
        """Return the policy, loaded.

        Raises:
            ConfigError: it acts beside its environment.
        """
        return self.load(self.found)

    def load(self, found: ResolvedPolicy) -> Asked:
        """Return a policy that was found, loaded, to be asked for plans."""
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
        return Asked(policy, self.counted)

    def counted(self) -> None:
        """Count a plan."""
        self._plans += 1
        self.count()

    @cached_property
    def files(self) -> Files:
        """Return what is said of policy, data and environment."""
        return Files(
            found=self.found, recording=self.recording, facts=self.facts,
            episodes=self.episodes, most_steps=self.most_steps,
        )  # fmt: skip

    @cached_property
    def statistics(self) -> StatisticsMatch | None:
        """Return how the checkpoint's statistics fit the data; None: one of both is missing."""
        if self.found.checkpoint is None or self.recording is None:
            return None
        return match_statistics(self.found.checkpoint, self.recording.reader)

    @property
    def card(self) -> Mapping[str, object]:
        """Return what the policy, or its server, says of itself."""
        card = getattr(self.asked.policy, "card", {})
        return card if isinstance(card, Mapping) else {}

    def line(
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


def cause(what: str, evidence: str, change: str = "") -> Verdict:
    """Return the verdict of one cause, with its evidence and what to change."""
    parts = [f"{what[0].upper()}{what[1:]}: {evidence}", *([change] if change else [])]
    return Verdict(causes=(what,), sentence=f"{'; '.join(parts)}.")
