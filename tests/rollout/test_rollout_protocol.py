"""The protocols: exactly which episodes they mean."""

from dataclasses import replace

import pytest

from dzrobot.envs.libero.suites import SUITES
from dzrobot.errors import ConfigError, ProtocolError, UnknownNameError
from dzrobot.rollout.protocol import PROTOCOLS, Selection, plan_cases, shard_of

STANDARD, RLINF, CUSTOM = (PROTOCOLS[n] for n in ("standard-10x50", "rlinf-512", "custom"))
STEPS = {
    "libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520,
    "libero_90": 400,
}  # fmt: skip


def starts(cases):
    return [(case.suite, case.task_id, case.init_state_id) for case in cases]


@pytest.mark.parametrize("suite", SUITES)
def test_standard_is_every_start_of_every_task_once(suite):
    cases = plan_cases(Selection(protocol=STANDARD, suites=(suite,)))
    assert starts(cases) == [(suite, task, k) for task in range(SUITES[suite]) for k in range(50)]
    assert {case.max_steps for case in cases} == {STEPS[suite]}
    assert {case.env for case in cases} == {f"dzrobot/{suite}-v0"}
    assert (STANDARD.settle_steps, STANDARD.history, STANDARD.stop_at_success) == (10, None, True)


def test_rlinf_is_500_starts_and_12_repeats_that_say_so():
    cases = plan_cases(Selection(protocol=RLINF, suites=("libero_spatial",)))
    assert len(cases) == 512
    repeats = [case for case in cases if case.repeat_of is not None]
    once = [case for case in cases if case.repeat_of is None]
    assert len(repeats) == 12
    assert len(set(starts(once))) == 500
    by_episode = {(case.task_id, case.episode): case for case in once}
    for case in repeats:
        first = by_episode[case.task_id, case.repeat_of]
        assert case.init_state_id == first.init_state_id
        assert case.name != first.name
    assert {case.max_steps for case in cases} == {480}
    assert (RLINF.settle_steps, RLINF.history) == (15, "off")


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=lambda protocol: protocol.name)
def test_names_and_noise_of_a_run_are_unique(protocol):
    chosen = {"env": protocol.suite or "dzrobot/point-v0"}
    if protocol in (STANDARD, RLINF):
        chosen = {"suites": tuple(suite for suite in SUITES if suite != "libero_90")}
    cases = plan_cases(Selection(protocol=protocol, **chosen))
    for values in ([case.name for case in cases], [case.noise_key for case in cases]):
        assert len(set(values)) == len(cases)


def test_a_part_of_a_run_has_the_same_episodes_as_the_whole():
    whole = plan_cases(Selection(protocol=STANDARD, suites=("libero_goal",)))
    part = plan_cases(
        Selection(protocol=STANDARD, suites=("libero_goal",), tasks=(3, 7), episodes=2)
    )
    assert [case for case in whole if case.task_id in (3, 7) and case.episode < 2] == list(part)
    other = plan_cases(
        Selection(protocol=STANDARD, suites=("libero_goal",), tasks=(3, 7), episodes=2, seed=1)
    )
    assert not {c.noise_key for c in part} & {c.noise_key for c in other}
    assert starts(part) == starts(other)


def test_changes_to_a_named_protocol_are_told():
    selection = Selection(protocol=STANDARD, suites=("libero_goal",))
    assert selection.changes == ()
    changed = replace(selection, tasks=(1,), episodes=3, max_steps=40, arguments={"quality": "x"})
    assert len(changed.changes) == 4
    # A shortened run has no trajectories to repeat.
    short = replace(selection, protocol=RLINF, tasks=(0,), episodes=2)
    assert all(case.repeat_of is None for case in plan_cases(short))


@pytest.mark.parametrize("count", [1, 3, 7, 600])
def test_shards_cut_a_run_into_disjoint_parts(count):
    cases = plan_cases(Selection(protocol=RLINF, suites=("libero_object",)))
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
        plan_cases(Selection(protocol=STANDARD, **chosen))


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_shards_that_cannot_be_are_refused(index, count):
    cases = plan_cases(Selection(protocol=CUSTOM, env="dzrobot/point-v0"))
    with pytest.raises(ConfigError, match="shard"):
        shard_of(cases, index, count)
