"""From a request to a plan, once; from a card to the same records again."""

import json
from collections import Counter

import gymnasium as gym
import pytest

from dzrobot.cli import main
from dzrobot.errors import ProtocolError
from dzrobot.policies.dreamzero import options
from dzrobot.policies.dreamzero.bundled import SCORED, default_checkpoint
from dzrobot.policies.dreamzero.checkpoints import directory
from dzrobot.rollout.evaluation.card import REQUEST, keep_card, read_card
from dzrobot.rollout.evaluation.comparison import read_results
from dzrobot.rollout.evaluation.evaluate import conclude, evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, RunOptions, plan, prepare
from dzrobot.rollout.perturbation import Perturbation
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec

QUICK = RunOptions(workers=0, videos="none", predictions=False)


def results(folder):
    return {name: one.result() for name, one in read_results(folder).records.items()}


def again(folder):
    """Return what the card in ``folder`` says to evaluate."""
    return EvaluationRequest.of(json.loads((folder / "card.json").read_text()))


def run_twice(request, tmp_path):
    """Evaluate, and once more what the card says; return both results."""
    first, second = tmp_path / "first", tmp_path / "second"
    evaluate(prepare(request), first, QUICK)
    assert again(first) == EvaluationRequest.of(read_card(first))
    evaluate(prepare(again(first)), second, QUICK)
    assert read_card(first) == read_card(second)
    return results(first), results(second)


@pytest.fixture
def counted(monkeypatch):
    """Return how often what is expensive, or has one answer, was asked for."""
    found = Counter()

    def watch(place, name, what):
        inner = getattr(place, name)

        def outer(*args, **kwargs):
            found[what] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(place, name, outer)

    watch(gym, "make", "environments made")
    watch(options.ActingOptions, "__init__", "options filled")
    watch(directory, "open_weights", "weights opened")
    return found


@pytest.mark.parametrize("extra", [(), ("--env-arg", "resolution=128")])
def test_an_evaluation_asks_everything_once(counted, tmp_path, extra):
    words = ["eval", "--env", "dzrobot/point-v0", "--checkpoint", str(default_checkpoint())]
    words += ["--episodes", "1", "--max-steps", "9", "--workers", "0", "--videos", "none"]
    assert main([*words, *extra, "--output", str(tmp_path)]) == 0
    # One to be looked at, one for the episode; a size that the user left open is another one.
    made = 2 if extra else 3
    assert counted == {"environments made": made, "options filled": 1, "weights opened": 1}


def test_a_request_is_the_same_after_a_card(tmp_path):
    request = EvaluationRequest(
        spec=EvalSpec(
            protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", tasks=(0, 2), episodes=2,
            first_episode=1, max_steps=4, seed=3, arguments={"resolution": 32},
        ),
        policy=PolicySpec(
            name="random", embodiment="libero_mini", seed=5
        ),
        ablation="shuffle",
        perturbation=Perturbation(axis="noise", level=2),
    )  # fmt: skip
    first, second = run_twice(request, tmp_path)
    assert again(tmp_path / "first") == request
    assert first == second
    assert sorted(one["episode"] for one in first.values()) == [1, 1, 2, 2]


def test_a_card_that_does_not_say_it_is_refused(tmp_path):
    request = EvaluationRequest(
        spec=EvalSpec(protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=1),
        policy=PolicySpec(name="hold"),
    )
    card = dict(prepare(request).card)
    del card[REQUEST]
    with pytest.raises(ProtocolError, match="earlier version"):
        EvaluationRequest.of(card)
    # It is not a condition: results of an earlier version go on.
    opened = prepare(request)
    keep_card(tmp_path, card, opened.plan.cases)
    assert evaluate(opened, tmp_path, QUICK).complete


def test_what_is_in_a_folder_is_concluded_alike_however_it_came_there(tmp_path):
    request = EvaluationRequest(
        spec=EvalSpec(
            protocol=PROTOCOLS["custom"], env="dzrobot/point-v0", episodes=4, max_steps=5
        ),
        policy=PolicySpec(name="random"),
    )
    summary = evaluate(prepare(request), tmp_path, QUICK)
    written = (tmp_path / "summary.json").read_bytes()
    assert conclude(tmp_path) == summary
    assert (tmp_path / "summary.json").read_bytes() == written
    assert conclude(tmp_path, (1, 2)).total.episodes == 2


def asked(name, task):
    """Return one short episode of a protocol by the bundled policy of a task; None: no such."""
    suites = ("libero_object",) if task == "libero_object" else ()
    env = None if suites else "dzrobot/lift-v0"
    if name in ("standard-10x50", "rlinf-500", "rlinf-may") and not suites:
        return None
    if name == "lift-100" and suites:
        return None
    spec = EvalSpec.named(PROTOCOLS[name], suites, env, tasks=(0,) if suites else None, episodes=1,
                          max_steps=4)  # fmt: skip
    return EvaluationRequest(spec=spec)


EACH = [(name, task) for name in PROTOCOLS for task in SCORED if asked(name, task) is not None]


def test_every_protocol_and_bundled_policy_is_run_from_its_card():
    assert {name for name, _ in EACH} == set(PROTOCOLS)
    assert {task for _, task in EACH} == set(SCORED)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        pytest.param(
            name,
            task,
            marks=[
                *([pytest.mark.libero] if task == "libero_object" else []),
                *([pytest.mark.long] if name != "lift-100" else []),
            ],
        )
        for name, task in EACH
    ],
)
def test_a_card_runs_its_evaluation_again(name, task, tmp_path, request):
    if task == "libero_object":
        request.getfixturevalue("libero_assets")
    first, second = run_twice(asked(name, task), tmp_path)
    assert first == second
    # A protocol in rounds runs some starts again.
    assert {(one["steps"], one["error"]) for one in first.values()} == {(4, None)}


def test_a_plan_loads_nothing():
    request = asked("lift-100", "lift")
    planned = plan(request)
    assert planned.request.policy.name == str(default_checkpoint("lift"))
    assert planned.found.acting.noise == "keyed"
    assert planned.facts.keys() == planned.arguments.keys() == {"dzrobot/lift-v0"}
