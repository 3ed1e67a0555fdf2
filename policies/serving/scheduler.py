"""Which requests the policy plans next: one thread owns it, the earliest deadline comes first."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dzrobot.errors import DzrobotError, InvalidActionError, ServerError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Ask, Leftover, Plan, Policy, robot_of
from dzrobot.policies.serving.endpoint import ServerMetrics
from dzrobot.policies.serving.sessions import Session, check_plan

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FAILED = "the policy has failed and the server is stopping: see its log"


@dataclass(frozen=True, kw_only=True)
class ScheduledPlan:
    """The result of one request."""

    actions: Any
    """(H, A) float32."""

    timing: dict[str, float]
    """Milliseconds by stage of the work."""

    batch: int
    """Sessions that were planned for in the same call."""

    plan: Plan
    """What the actions were made from."""


@dataclass(eq=False)
class _Waiting:
    session: Session
    observation: Observation
    leftover: Leftover | None
    deadline: float
    number: int
    answer: "asyncio.Future[ScheduledPlan]"
    arrived: float = field(default_factory=time.monotonic)


class Scheduler:
    """Brings requests to a policy that may be called from one thread only.

    An unexpected exception leaves the policy in an unknown state: :attr:`fault` is set, every
    request fails, and the server has to end.

    Args:
        policy: The policy that plans.
        metrics: Where requests are counted.
        max_batch: Most sessions in one call.
        window_s: How long a request waits for others to share its call.
    """

    def __init__(
        self,
        policy: Policy,
        metrics: ServerMetrics,
        *,
        max_batch: int = 1,
        window_s: float = 0.0,
    ) -> None:
        self._policy = policy
        self._metrics = metrics
        self._max_batch = max_batch
        self._window_s = window_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._waiting: list[_Waiting] = []
        self._new_request = asyncio.Event()
        self._numbers = itertools.count()
        self.running = 0
        """Requests whose plans are being computed."""

        # Read whenever `/metrics` is asked for.
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.running.set_function(lambda: self.running)
        self.fault: BaseException | None = None
        self.failed = asyncio.Event()
        """Set when the policy has failed."""

    @property
    def idle(self) -> bool:
        """Return whether no request is waiting or running."""
        return not self._waiting and not self.running

    async def plan(
        self,
        session: Session,
        observation: Observation,
        within_s: float,
        leftover: Leftover | None = None,
    ) -> ScheduledPlan:
        """Return the plan of ``session`` for an observation.

        Args:
            session: Which session.
            observation: What its robot observes.
            within_s: When the answer is due, in seconds from now; the earliest is served first.
            leftover: What the plan is to continue, if the policy supports that.

        Raises:
            DzrobotError: the policy refuses the observation; the session is as it was.
            ServerError: the policy has failed.
        """
        self._check_usable()
        answer: asyncio.Future[ScheduledPlan] = asyncio.get_running_loop().create_future()
        due = time.monotonic() + within_s
        waiting = _Waiting(session, observation, leftover, due, next(self._numbers), answer)
        self._waiting.append(waiting)
        self._new_request.set()
        try:
            return await answer
        finally:
            if waiting in self._waiting:
                # Its client is gone.
                self._waiting.remove(waiting)

    async def end(self, session: Session) -> None:
        """Evict ``session`` from the policy; returns when its memory is free."""
        if self.fault is None:
            await self.call(lambda: self._evict(session))

    async def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns in the policy's thread, after what runs there already.

        Raises:
            DzrobotError: as ``work`` raises it.
            ServerError: it raised anything else.
        """
        self._check_usable()
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        # Work in the thread cannot be interrupted: even a cancelled caller waits for it.
        await asyncio.wait([future])
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, DzrobotError):
            raise error
        self._fail(error)
        raise ServerError(_FAILED) from error

    async def run(self) -> None:
        """Serve requests until cancelled."""
        while True:
            await self._new_request.wait()
            if self._max_batch > 1 and self._window_s and len(self._waiting) < self._max_batch:
                await asyncio.sleep(self._window_s)
            group = self._next()
            if not self._waiting:
                self._new_request.clear()
            if group:
                await self._serve(group)

    def close(self) -> None:
        """End the policy's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> list[_Waiting]:
        """Take the request that is due first and those that can share its call."""
        ordered = sorted(self._waiting, key=lambda waiting: (waiting.deadline, waiting.number))
        if not ordered:
            return []
        stage = self._stage(ordered[0].session)
        group = [w for w in ordered if self._stage(w.session) == stage][: self._max_batch]
        self._waiting = [waiting for waiting in self._waiting if waiting not in group]
        return group

    def _stage(self, session: Session) -> int:
        # Called between plans, so no session advances meanwhile.
        return 0 if session.fresh else self._policy.stage(session.seat)

    async def _serve(self, group: Sequence[_Waiting]) -> None:
        began = time.monotonic()
        self.running = len(group)
        try:
            answers = await self.call(lambda: self._plan(group))
        except DzrobotError as error:
            answers = [error] * len(group)
        finally:
            self.running = 0
        for waiting, answer in zip(group, answers, strict=True):
            self._metrics.queue.observe(began - waiting.arrived)
            if waiting.answer.done():
                continue
            if isinstance(answer, DzrobotError):
                waiting.answer.set_exception(answer)
                continue
            self._count(waiting, answer)
            answer.timing["queue_ms"] = 1000 * (began - waiting.arrived)
            waiting.answer.set_result(answer)

    def _count(self, waiting: _Waiting, plan: ScheduledPlan) -> None:
        self._metrics.batch.observe(plan.batch)
        for part, milliseconds in plan.timing.items():
            self._metrics.part.labels(part.removesuffix("_ms")).observe(milliseconds / 1000)
        if time.monotonic() > waiting.deadline:
            self._metrics.late.inc()

    def _plan(self, group: Sequence[_Waiting]) -> list[ScheduledPlan | DzrobotError]:
        """Plan in the policy's thread; a refused request does not fail the others."""
        for waiting in group:
            session = waiting.session
            if session.fresh:
                self._policy.reset(session.seat, episode=session.episode)
                session.fresh = False
        try:
            return self._call_policy(group)
        except DzrobotError as error:
            if len(group) == 1:
                return [error]
            return [answer for waiting in group for answer in self._plan([waiting])]

    def _call_policy(self, group: Sequence[_Waiting]) -> list[ScheduledPlan | DzrobotError]:
        asks = [
            Ask(session=one.session.seat, observation=one.observation, leftover=one.leftover)
            for one in group
        ]
        began = time.perf_counter()
        plans = self._policy.plan(asks)
        usual = {"total_ms": 1000 * (time.perf_counter() - began)}
        return [self._scheduled(plan, usual, len(group)) for plan in plans]

    def _scheduled(
        self, plan: Plan, usual: Mapping[str, float], batch: int
    ) -> ScheduledPlan | DzrobotError:
        """Return the answer to one request; a plan that no client can execute is an error."""
        try:
            check_plan(plan, robot_of(self._policy), 1)
        except InvalidActionError as error:
            return error
        return ScheduledPlan(
            actions=plan.actions, timing={**usual, **plan.timing}, batch=batch, plan=plan
        )

    def _evict(self, session: Session) -> None:
        # Checked in this thread, after a plan that may have been running when its client left.
        if not session.fresh:
            self._policy.evict(session.seat)
            session.fresh = True

    def _check_usable(self) -> None:
        if self.fault is not None:
            raise ServerError(_FAILED)

    def _fail(self, error: BaseException) -> None:
        _log.error("the policy has failed", exc_info=error)
        self.fault = error
        self.failed.set()
        for waiting in self._waiting:
            if not waiting.answer.done():
                waiting.answer.set_exception(ServerError(_FAILED))
        self._waiting.clear()
