"""Plans that share a call of the network, and how busy an evaluation keeps its policy."""

import itertools
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from dzrobot.cli import main
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.policies.base import PlanningTotals, Policy
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, prepare
from dzrobot.rollout.evaluation.tables import busy_line
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.policy_use import RUNS_FILE, RunUse, covered, measured, read_uses, shares
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec
from dzrobot.rollout.queue import Gathering
from dzrobot.rollout.records import RecordFile

pytestmark = pytest.mark.copies

SPEC = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=3,
    max_steps=20, arguments={"resolution": 32},
)  # fmt: skip


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_request_waits_for_others_but_not_longer_than_the_window():
    clock = Clock()
    gathering = Gathering(0.5, clock)
    assert gathering.timeout(None) is None
    assert gathering.timeout(0.2) == 0.2
    assert gathering.take(3) == []
    gathering.add("first")
    clock.now += 0.3
    gathering.add("second")
    assert gathering.held == ("first", "second")
    # The oldest decides how long.
    assert gathering.timeout(None) == pytest.approx(0.2)
    assert gathering.timeout(0.1) == 0.1
    assert gathering.take(3) == []
    clock.now += 0.2
    assert gathering.take(3) == ["first", "second"]
    assert gathering.held == ()


ENDED = {}


class Counting:
    """Acts at random; notes which sessions are open when a run ends them all."""

    def __init__(self, robot):
        self.open = []

    def reset(self, session="default", *, episode=None):
        self.open.append(session)

    def act(self, obs, *, session="default"):
        return np.zeros(7, np.float32)

    def end_all(self):
        ENDED[type(self).__name__] = sorted(set(self.open))


class Older(Counting):
    """Of earlier versions: no name meant all sessions."""

    end_all = None

    def reset(self, session=None, *, episode=None):
        if session is None:
            Counting.end_all(self)
        else:
            self.open.append(session)


class Strict(Counting):
    """Its sessions have to be named, so none can be ended by ``reset()``."""

    end_all = None

    def reset(self, session, *, episode=None):
        self.open.append(session)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        (0, Counting), (0, Older), (0, Strict), (2, Counting),
        pytest.param(2, Older, marks=pytest.mark.long),
        pytest.param(2, Strict, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_run_ends_all_sessions_when_it_is_over(kind, workers, tmp_path, caplog):
    ENDED.clear()
    policy = PolicySpec(name=f"{__name__}:{kind.__name__}")
    spec = replace(SPEC, max_steps=3)
    evaluate(
        prepare(EvaluationRequest(spec=spec, policy=policy)), tmp_path, RunOptions(workers=workers)
    )
    sessions = [f"worker-{n}" for n in range(workers)] or ["default"]
    told = [m for m in caplog.messages if "sessions were not ended" in m]
    assert (ENDED, len(told)) == (({}, 1) if kind is Strict else ({kind.__name__: sessions}, 0))


def test_nobody_waits_once_all_have_asked():
    gathering = Gathering(1000.0, Clock())
    gathering.add("first")
    gathering.add("second")
    assert gathering.take(2) == ["first", "second"]
    # Who is left alone is answered at once.
    gathering.add("first")
    assert gathering.take(1) == ["first"]


def assert_fewer_at_ends(sizes):
    """All episodes share a call; only where one ends, it is smaller than the call before."""
    assert sizes[0] == 3
    ended = sum(after < before for before, after in itertools.pairwise(sizes))
    assert ended <= 6, sizes


def batched(policy, folder, **options):
    wanted = PolicySpec(name=f"rollout_policies:{policy}")
    prepared = prepare(EvaluationRequest(spec=SPEC, policy=wanted, batched=True))
    evaluate(prepared, folder, RunOptions(videos="none", workers=3, **options))
    return {name: record.result() for name, record in RecordFile(folder).records.items()}


def test_within_the_window_all_episodes_share_every_call(tmp_path):
    from_one = prepare(
        EvaluationRequest(spec=SPEC, policy=PolicySpec(name="rollout_policies:Steer"))
    )
    evaluate(from_one, tmp_path / "alone", RunOptions(videos="none", workers=0))
    alone = {n: r.result() for n, r in RecordFile(tmp_path / "alone").records.items()}
    module = sys.modules["rollout_policies"]
    module.Together.batches.clear()
    found = batched("Together", tmp_path / "together", batch_window_s=600)
    assert found == alone
    assert_fewer_at_ends(module.Together.batches)


def test_who_needs_no_plan_does_not_wait(tmp_path):
    module = sys.modules.get("rollout_policies")
    found = batched("Chunked", tmp_path / "chunked", batch_window_s=600)
    module = module or sys.modules["rollout_policies"]
    planned = module.Chunked.planned
    # Held back at every step, they would drift apart, and most calls have one plan.
    assert sum(planned) > 2 * len(planned), planned
    steps = sum(record["steps"] for record in found.values())
    # Every fourth step, begun ones included.
    assert steps / 4 <= sum(planned) < steps / 4 + len(found)


def test_a_window_is_a_time():
    with pytest.raises(ConfigError, match="batch_window_s=-1"):
        RunOptions(batch_window_s=-1)
    with pytest.raises(ConfigError, match="batch_window_s=nan"):
        RunOptions(batch_window_s=float("nan"))


class Planner:
    """A policy that says how much it has planned."""

    def __init__(self):
        self.planning = PlanningTotals()

    def act(self, obs, *, session="default"):
        raise NotImplementedError

    reset = act


def interrupted(policy, folder):
    with measured(policy, "cpu", folder):
        policy.planning.add(1.0, plans=2, calls=2)
        raise KeyboardInterrupt


def test_every_run_leaves_a_line(tmp_path):
    policy = Planner()
    policy.planning.add(5.0, plans=7, calls=7)
    with measured(policy, "cpu", tmp_path):
        policy.planning.add(2.0, plans=6, calls=2)
    with measured(policy, "cpu", tmp_path):
        """Nothing was planned, as where every episode had a result."""
    with pytest.raises(KeyboardInterrupt):
        interrupted(policy, tmp_path)
    with measured(Policy(), None, tmp_path):
        """One that does not know leaves none."""
    uses = read_uses(tmp_path)
    assert [(use.planning_s, use.plans, use.calls) for use in uses] == [(2.0, 6, 2), (1.0, 2, 2)]
    assert shares(uses)["plans_per_call"] == 2
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write('{"wall_s": 1.0, "plan')
    # What a kill left of a line is not read.
    assert read_uses(tmp_path) == uses
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write(json.dumps({"wall_s": -1.0}) + "\n")
    with pytest.raises(ProtocolError, match=r"runs\.jsonl:3"):
        read_uses(tmp_path)


def test_a_damaged_line_is_found_before_anything_is_run(tmp_path):
    prepared = prepare(
        EvaluationRequest(spec=SPEC, policy=PolicySpec(name="rollout_policies:Steer"))
    )
    (tmp_path / RUNS_FILE).write_text("[]\n")
    with pytest.raises(ProtocolError, match=r"runs\.jsonl:1"):
        evaluate(prepared, tmp_path, RunOptions(videos="none", workers=0))
    assert not (tmp_path / "records.jsonl").exists()
    (tmp_path / RUNS_FILE).unlink()
    (tmp_path / RUNS_FILE).symlink_to("/dev/zero")
    with pytest.raises(ProtocolError):
        read_uses(tmp_path)


def test_shares_are_of_all_runs():
    first = RunUse(wall_s=10.0, planning_s=4.0, plans=9, calls=3, kernel_share=0.5)
    cut = RunUse(wall_s=30.0, planning_s=4.0, plans=1, calls=1, kernel_share=None)
    # The device was traced in the first alone.
    assert shares([first, cut]) == {
        "planning_share": 0.2, "plans_per_call": 2.5, "device_busy_share": 0.2,
    }  # fmt: skip
    assert "device_busy_share" not in shares([cut])
    assert shares([]) == {}
    assert busy_line(shares([first])) == (
        "the policy planned 40 % of the time, 3.00 plans a call; device busy 20 %"
    )
    assert busy_line(shares([cut])).endswith("1.00 plans a call")
    assert busy_line({}) == ""


def test_spans_that_overlap_count_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == 4
    assert covered([]) == 0


def test_the_window_is_a_flag_of_batches(capsys):
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--batch-window-ms"]
    assert main([*words, "5"]) == 2
    assert "give --batch besides" in capsys.readouterr().err
    assert main([*words, "5", "--batch"]) == 2
    assert "hold takes one at a time" in capsys.readouterr().err
    assert main([*words, "-1", "--batch"]) == 2
    assert "--batch-window-ms" in capsys.readouterr().err
