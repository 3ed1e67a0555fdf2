"""Actors in the place of one process: whoever runs a case and whatever is lost, the result is one.

Ray is a fake here, whose actors are objects of this process and are lost when a test says so; the
real one is in test_rollout_ray.py.
"""

import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dzrobot.cli import main
from dzrobot.cluster import Cluster, ClusterOptions, Needs
from dzrobot.errors import ConfigError, ProtocolError, UnknownNameError
from dzrobot.rollout.evaluation import actors
from dzrobot.rollout.evaluation.actors import ActorGroup, needs_of, own_folder, shared_out
from dzrobot.rollout.evaluation.evaluate import evaluate
from dzrobot.rollout.evaluation.planning import (
    EvaluationRequest,
    RunOptions,
    prepare,
    render_variables,
)
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, environment_key, plan_episodes
from dzrobot.rollout.queue import LocalQueue
from dzrobot.rollout.records import RecordFile

pytestmark = pytest.mark.copies
SPEC = EvalSpec(
    protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=3,
    max_steps=20, arguments={"resolution": 32},
)  # fmt: skip
CASES = plan_episodes(SPEC)
STEER = EvaluationRequest(spec=SPEC, policy=PolicySpec(name="rollout_policies:Steer"))
HERE = RunOptions(workers=0, videos="failures")


STARTED = []
"""What stands for processes."""


@pytest.fixture(autouse=True)
def ended():
    """End what a test has started: each has a thread that waits for cases."""
    yield
    while STARTED:
        STARTED.pop()._queue.close()


class LostError(Exception):
    """What Ray raises where an actor was lost."""


class RaisedError(Exception):
    """What Ray raises around what an actor raised."""

    def __init__(self, cause):
        super().__init__(f"a page about {cause}")
        self.cause = cause


@dataclass(eq=False)
class FakeActor:
    """One actor: each call runs on a thread, and is lost with the actor."""

    ray: "FakeRay"
    made: tuple
    number: int
    calls: list = field(default_factory=list)

    def __post_init__(self):
        self.inner = self.made[0](*self.made[1:])
        STARTED.append(self.inner)

    def __getattr__(self, name):
        call = SimpleNamespace(remote=lambda *words: self.ask(name, *words))
        call.options = lambda **_: call
        return call

    def ask(self, name, *words):
        ref, inner = Future(), self.inner
        self.calls.append(ref)

        def settled(job):
            error = job.exception()
            known = error is None or isinstance(error, LostError)
            settle(ref, error if known else RaisedError(error), None if error else job.result())

        job = self.ray.threads.submit(
            lambda: self.ray.answers(self, name, words, getattr(inner, name)(*words))
        )
        job.add_done_callback(settled)
        return ref

    def lose(self):
        """Be killed: no call is answered, and another process takes the place."""
        calls, self.calls = self.calls, []
        self.__post_init__()
        for ref in calls:
            settle(ref, LostError("the actor died"))


def settle(ref, error, answer=None):
    if not ref.done():
        ref.set_exception(error) if error is not None else ref.set_result(answer)


class FakeRay:
    """As much of Ray as is used."""

    exceptions = SimpleNamespace(RayTaskError=RaisedError, RayError=LostError)

    def __init__(self, cpus=(2,)):
        self.actors, self.cpus, self.threads = [], cpus, ThreadPoolExecutor(16)

    def answers(self, actor, name, words, answer):
        """Return what an actor answers: what it would have anyway."""
        return answer

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": cpus, "memory": 1}} for cpus in self.cpus]

    def remote(self, **_):
        def kind(made):
            return SimpleNamespace(remote=lambda *words: self.start(made, *words))

        return kind

    def start(self, *made):
        self.actors.append(FakeActor(self, made, len(self.actors)))
        return self.actors[-1]

    def wait(self, refs, num_returns=1, timeout=None):
        assert num_returns in (1, len(refs))
        wait(refs, timeout, FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED")
        done = [ref for ref in refs if ref.done()]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref):
        return ref.result()

    def kill(self, actor):
        assert actor in self.actors


def grouped(ray, evaluation=STEER, options=HERE, actors=None):
    return ActorGroup(Cluster(ray, ClusterOptions(actors=actors)), evaluation, options)


def evaluated(group, output, report=lambda _: None):
    options = replace(HERE, engine=group.engine)
    return evaluate(group.opened, output, options, report)


def results(folder):
    return {name: record.result() for name, record in RecordFile(folder).records.items()}


def kept(folder):
    """Return every file of an episode."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for kind in ("videos", "errors")
        for path in (folder / kind).rglob("*") if path.is_file()
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(policies, tmp_path_factory):
    """Return the folder of a run in this process."""
    folder = tmp_path_factory.mktemp("alone")
    evaluate(prepare(STEER), folder, HERE)
    assert len(kept(folder)) > 0
    return folder


def test_results_do_not_depend_on_who_runs_a_case(alone, tmp_path):
    ray, played = FakeRay(cpus=(1, 2)), []
    evaluated(grouped(ray), tmp_path, played.append)
    assert len(ray.actors) == 3
    assert [far.done for far in played] == list(range(len(CASES) + 1))
    assert results(tmp_path) == results(alone)
    assert kept(tmp_path) == kept(alone)


def test_an_actor_has_workers_of_its_own(alone, tmp_path):
    ray = FakeRay(cpus=(2,))
    evaluated(grouped(ray, options=replace(HERE, workers=2)), tmp_path)
    assert len(ray.actors) == 1
    assert results(tmp_path) == results(alone)
    assert kept(tmp_path) == kept(alone)


def test_what_a_lost_actor_had_is_run_again(alone, tmp_path, caplog):
    ray = FakeRay()

    def lose_one(far):
        if far.done == 2:
            ray.actors[0].lose()

    evaluated(grouped(ray), tmp_path, lose_one)
    assert results(tmp_path) == results(alone)
    assert kept(tmp_path) == kept(alone)
    assert "which Ray starts again" in caplog.text


def test_an_actor_that_started_again_unseen_is_prepared_before_it_runs_a_case(
    alone, tmp_path, caplog
):
    # One actor: were there two, the other might run all that is left.
    ray = FakeRay(cpus=(1,))

    def start_again(far):
        if far.done == 2:
            ray.actors[0].__post_init__()

    evaluated(grouped(ray), tmp_path, start_again)
    assert results(tmp_path) == results(alone)
    assert "it was started again" in caplog.text


def test_a_case_that_always_loses_its_process_is_an_error(alone, tmp_path):
    class Deadly(FakeRay):
        tried = 0

        def answers(self, actor, name, words, answer):
            if name == "play" and words[0] == CASES[1]:
                self.tried += 1
                raise LostError("it died")
            return answer

    ray = Deadly()
    summary = evaluated(grouped(ray), tmp_path)
    records = RecordFile(tmp_path).records
    assert ray.tried == actors.MOST_LOSSES + 1
    assert "it died" in records[CASES[1].name].error
    assert [name for name, one in records.items() if one.error] == [CASES[1].name]
    assert summary.total.episodes == len(CASES) - 1


def test_a_killed_simulator_is_a_lost_case(alone, tmp_path, monkeypatch):
    """As where it runs out of memory; on one machine, the same command runs it again."""
    died = []

    class Once(actors._FedQueue):
        def conclude(self, record):
            if not died:
                died.append(record.case)
                record = replace(record, success=None, error="the worker process died with ...")
            super().conclude(record)

    monkeypatch.setattr(actors, "_FedQueue", Once)
    evaluated(grouped(FakeRay()), tmp_path)
    assert len(died) == 1
    assert results(tmp_path) == results(alone)


def test_an_actor_that_would_get_other_results_is_refused(tmp_path):
    both = threading.Event()

    class Unlike(FakeRay):
        def answers(self, actor, name, words, answer):
            if name == "play":
                both.wait(60)
            elif actor.number == 1:
                both.set()
                return replace(answer, card={**answer.card, "seed": 1})
            return answer

    with pytest.raises(ProtocolError, match=r"seed: [01] in one actor, [01] in another"):
        evaluated(grouped(Unlike()), tmp_path)


def test_what_an_actor_finds_wrong_is_the_message():
    wrong = replace(STEER, policy=PolicySpec(name="rollout_policies:Stear"))
    with pytest.raises(UnknownNameError, match="Stear"):
        grouped(FakeRay(), wrong)


def test_an_actor_that_fits_nowhere_is_said_to():
    with pytest.raises(ConfigError, match=r"needs 8 CPUs and 0 GPUs on one machine.*2 CPUs"):
        grouped(FakeRay(), options=replace(HERE, workers=8))


def test_without_an_actor_a_run_ends(monkeypatch):
    class Full(FakeRay):
        def answers(self, actor, name, words, answer):
            over.wait(60)

    over = threading.Event()
    monkeypatch.setattr(actors, "PATIENCE_S", 0.1)
    with pytest.raises(ProtocolError, match="no actor has started"):
        grouped(Full())
    over.set()


def test_an_arm_takes_one_process(tmp_path):
    prepared = prepare(STEER)
    arm = {name: replace(own, moves_an_arm=True) for name, own in prepared.plan.facts.items()}
    options = replace(HERE, engine=grouped(FakeRay()).engine)
    with pytest.raises(ConfigError, match="leave --ray out"):
        evaluate(replace(prepared, plan=replace(prepared.plan, facts=arm)), tmp_path, options)


@pytest.mark.parametrize(
    ("device", "other", "needs"),
    [("cpu", None, Needs(4)), ("cuda", None, Needs(0, 1)), ("cuda:0", "cuda:1", Needs(0, 2))],
)
def test_what_an_actor_occupies(device, other, needs):
    assert needs_of(PolicySpec(device=device, cfg_device=other), 4) == needs


def test_a_case_that_was_put_back_is_the_next_one():
    queue = LocalQueue(CASES)
    first, second = queue.take(None), queue.take(None)
    queue.put_back(first)
    assert queue.take(environment_key(second)) == first
    last = [queue.take(environment_key(CASES[-1])) for _ in range(4)]
    assert [case.task_id for case in last] == [2, 2, 2, 0]
    queue.put_back(last[0])
    assert queue.take(environment_key(CASES[0])) == last[0]


@pytest.mark.parametrize(
    ("gpu", "count", "own"),
    [(0, 1, ["0", "1", "2"]), (0, 2, ["0", "2"]), (1, 2, ["1"]), (4, 8, ["1"])],
)
def test_actors_of_a_machine_share_what_draws(gpu, count, own):
    shared = shared_out(render_variables((0, 1, 2)), gpu, count)
    assert [one["MUJOCO_EGL_DEVICE_ID"] for one in shared] == own
    assert RunOptions().variables == ()


def test_simulators_draw_where_they_are_told(tmp_path, monkeypatch, policies):
    monkeypatch.setenv("SIGNED", str(tmp_path / "signed"))
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "7")
    words = ["eval", "--env", "dzrobot/point-v0", "--policy", "rollout_policies:Drawn", "--videos",
             "none", "--privileged", "--max-steps", "2", "--episodes", "6"]  # fmt: skip
    told = ["--workers", "2", "--render-device", "1-2", "--output", str(tmp_path / "run")]
    assert main([*words, *told]) == 0
    assert set((tmp_path / "signed").read_text().split()) == {"1", "2"}


def test_torchrun_is_told_the_new_command(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["eval", "--env", "dzrobot/point-v0", "--policy", "hold"]) == 2
    assert "dzrobot eval ... --ray" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("dzrobot.importing.find_spec", lambda name: None)
    assert main(["eval", "--env", "dzrobot/point-v0", "--policy", "hold", "--ray"]) == 2
    assert "--ray needs ray: pip install -e '.[cluster]'" in capsys.readouterr().err


def test_actors_are_of_a_cluster(capsys):
    assert main(["eval", "--env", "dzrobot/point-v0", "--actors", "2"]) == 2
    assert "give --ray besides" in capsys.readouterr().err


def test_folders_of_killed_actors_are_removed_by_the_next(tmp_path):
    """Also while another one runs, whose folder stays."""
    program = (
        "import pathlib, signal, sys; from dzrobot.rollout.evaluation.actors import own_folder\n"
        "with own_folder(pathlib.Path(sys.argv[1])) as own:\n"
        "    (own / 'video.mp4').touch(); print(own, flush=True); signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as actor:
        killed = Path(actor.stdout.readline().strip())
        with own_folder(tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([killed, other])
            actor.kill()
            actor.wait()
            with own_folder(tmp_path) as third:
                assert sorted(tmp_path.iterdir()) == sorted([other, third])
    assert not list(tmp_path.iterdir())
