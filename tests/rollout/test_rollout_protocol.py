"""The protocols: exactly which episodes they mean."""

from dataclasses import replace

import pytest

from dzrobot.errors import ConfigError, ProtocolError, UnknownNameError
from dzrobot.registration import LIBERO_SUITES
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes, shard_of

STANDARD, RLINF, MAY, CUSTOM = (
    PROTOCOLS[n] for n in ("standard-10x50", "rlinf-500", "rlinf-may", "custom")
)
STEPS = {
    "libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520,
    "libero_90": 400,
}  # fmt: skip


def starts(cases):
    return [(case.suite, case.task_id, case.init_state_id) for case in cases]


SUITES = {suite.name: suite.tasks for suite in LIBERO_SUITES}


@pytest.mark.parametrize("suite", SUITES)
def test_standard_is_every_start_of_every_task_once(suite):
    cases = plan_episodes(EvalSpec(protocol=STANDARD, suites=(suite,)))
    assert starts(cases) == [(suite, task, k) for task in range(SUITES[suite]) for k in range(50)]
    assert {case.max_steps for case in cases} == {STEPS[suite]}
    assert {case.env for case in cases} == {f"dzrobot/{suite}-v0"}
    assert (STANDARD.settle_steps, STANDARD.history, STANDARD.stop_at_success) == (10, None, True)


@pytest.mark.parametrize("steps", [0, 5, 15])
def test_other_steps_to_settle_are_a_departure(steps):
    """Objects bounce where a scene had no time to settle: such a score is another one's."""
    spec = EvalSpec(
        protocol=STANDARD, suites=("libero_spatial",), arguments={"settle_steps": steps}
    )
    assert f"settle_steps={steps}" in spec.changes


def test_rlinf_since_june_is_every_start_once_without_memory():
    cases = plan_episodes(EvalSpec(protocol=RLINF, suites=("libero_spatial",)))
    assert starts(cases) == [("libero_spatial", task, k) for task in range(10) for k in range(50)]
    assert not any(case.repeat_of for case in cases)
    assert {case.max_steps for case in cases} == {480}
    assert (RLINF.settle_steps, RLINF.history, RLINF.stop_at_success) == (15, "off", True)


def test_rlinf_in_may_is_seven_rounds_of_64_and_the_first_again():
    cases = plan_episodes(EvalSpec(protocol=MAY, suites=("libero_spatial", "libero_goal")))
    for suite in ("libero_spatial", "libero_goal"):
        mine = [case for case in cases if case.suite == suite]
        once = [case for case in mine if case.repeat_of is None]
        repeats = [case for case in mine if case.repeat_of is not None]
        assert (len(mine), len(set(starts(mine))), len(repeats)) == (512, 448, 64)
        assert starts(once) == [(suite, k // 50, k % 50) for k in range(448)]
        assert starts(repeats) == starts(once)[:64]
        counts = [sum(case.task_id == task for case in mine) for task in range(10)]
        assert counts == [100, 64, 50, 50, 50, 50, 50, 50, 48, 0]
        by_episode = {(case.task_id, case.episode): case for case in once}
        for case in repeats:
            assert by_episode[case.task_id, case.repeat_of].init_state_id == case.init_state_id
        # A slot runs every 64th episode, and its noise is given by the key's remainder.
        assert [case.noise_key % 64 for case in mine] == list(range(64)) * 8
    assert {case.max_steps for case in cases} == {480}
    assert (MAY.settle_steps, MAY.history, MAY.noise) == (15, "off", "slot")


def test_a_part_of_a_run_in_rounds_has_the_episodes_of_the_whole():
    whole = plan_episodes(EvalSpec(protocol=MAY, suites=("libero_goal",)))
    spec = EvalSpec(protocol=MAY, suites=("libero_goal",), tasks=(1, 8))
    assert plan_episodes(spec) == tuple(case for case in whole if case.task_id in (1, 8))
    short = plan_episodes(replace(spec, tasks=None, episodes=2))
    assert short == tuple(case for case in whole if case.init_state_id < 2)
    with pytest.raises(ConfigError, match="no episode is selected that rlinf-may has"):
        plan_episodes(replace(spec, tasks=(9,)))
    with pytest.raises(ProtocolError, match="64 episodes side by side, but dzrobot/lift-v0 has 50"):
        plan_episodes(EvalSpec(protocol=MAY, env="dzrobot/lift-v0"))


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=lambda protocol: protocol.name)
def test_names_and_noise_of_a_run_are_unique(protocol):
    chosen = {"env": protocol.suite or "dzrobot/point-v0"}
    if protocol in (STANDARD, RLINF, MAY):
        chosen = {"suites": tuple(suite for suite in SUITES if suite != "libero_90")}
    cases = plan_episodes(EvalSpec(protocol=protocol, **chosen))
    for values in ([case.name for case in cases], [case.noise_key for case in cases]):
        assert len(set(values)) == len(cases)


def test_a_part_of_a_run_has_the_same_episodes_as_the_whole():
    whole = plan_episodes(EvalSpec(protocol=STANDARD, suites=("libero_goal",)))
    part = plan_episodes(
        EvalSpec(protocol=STANDARD, suites=("libero_goal",), tasks=(3, 7), episodes=2)
    )
    assert [case for case in whole if case.task_id in (3, 7) and case.episode < 2] == list(part)
    other = plan_episodes(
        EvalSpec(protocol=STANDARD, suites=("libero_goal",), tasks=(3, 7), episodes=2, seed=1)
    )
    assert not {c.noise_key for c in part} & {c.noise_key for c in other}
    assert starts(part) == starts(other)


def test_changes_to_a_named_protocol_are_told():
    spec = EvalSpec(protocol=STANDARD, suites=("libero_goal",))
    assert spec.changes == ()
    changed = replace(spec, tasks=(1,), episodes=3, max_steps=40, arguments={"quality": "x"})
    assert len(changed.changes) == 4


@pytest.mark.parametrize("count", [1, 3, 7, 600])
def test_shards_cut_a_run_into_disjoint_parts(count):
    cases = plan_episodes(EvalSpec(protocol=MAY, suites=("libero_object",)))
    parts = [shard_of(cases, index, count) for index in range(count)]
    assert sorted(case.name for part in parts for case in part) == sorted(c.name for c in cases)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ({}, ConfigError),
        ({"suites": ("libero_goal",), "env": "dzrobot/point-v0"}, ConfigError),
        ({"suites": ("libero_gaol",)}, UnknownNameError),
        ({"suites": ("libero_goal",), "tasks": (10,)}, ConfigError),
        ({"suites": ("libero_goal",), "episodes": 51}, ProtocolError),
        ({"suites": ("libero_goal",), "episodes": 0}, ConfigError),
    ],
)
def test_runs_that_cannot_be_are_refused(chosen, error):
    with pytest.raises(error):
        plan_episodes(EvalSpec(protocol=STANDARD, **chosen))


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_shards_that_cannot_be_are_refused(index, count):
    cases = plan_episodes(EvalSpec(protocol=CUSTOM, env="dzrobot/point-v0"))
    with pytest.raises(ConfigError, match="shard"):
        shard_of(cases, index, count)
