"""Tasks and initial states are the official ones, and are read without running foreign code."""

import pickle
import zipfile

import numpy as np
import pytest

from dzrobot.envs.libero.assets import import_libero
from dzrobot.envs.libero.simulated import rotation_vector
from dzrobot.envs.libero.suites import load_init_states, load_task
from dzrobot.errors import ModalityError, SimulatorError, UnknownNameError
from dzrobot.registration import LIBERO_SUITES


@pytest.mark.libero
def test_every_task_is_the_official_one(libero_assets):
    import_libero()
    from libero.libero import benchmark

    for suite, count in ((suite.name, suite.tasks) for suite in LIBERO_SUITES):
        official = benchmark.get_benchmark(suite)()
        assert official.n_tasks == count
        for task_id in range(count):
            task, theirs = load_task(suite, task_id), official.get_task(task_id)
            assert (task.name, task.language("name")) == (theirs.name, theirs.language)
            assert task.bddl.name == theirs.bddl_file
            assert task.bddl.is_file()
            states = load_init_states(task.init_states)
            assert states.shape[0] == 50
            assert len({row.tobytes() for row in states}) == 50
        np.testing.assert_array_equal(states, official.get_task_init_states(count - 1))


def test_unknown_tasks_are_named():
    with pytest.raises(UnknownNameError, match="Did you mean 'libero_spatial'"):
        load_task("libero_spacial", 0)
    with pytest.raises(ModalityError, match="0 to 89"):
        load_task("libero_90", 90)


def write_states(path, value):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value))


def test_a_states_file_that_is_no_array_is_refused_and_never_run(tmp_path):
    class Foreign:
        def __reduce__(self):
            return (print, ("run",))

    path = tmp_path / "task.pruned_init"
    write_states(path, np.eye(3))
    np.testing.assert_array_equal(load_init_states(path), np.eye(3))
    np.savez(tmp_path / "plain.npz", states=np.eye(3))
    np.testing.assert_array_equal(load_init_states(tmp_path / "plain.npz"), np.eye(3))
    write_states(path, np.arange(3.0))
    np.testing.assert_array_equal(load_init_states(path, single=True), [[0.0, 1.0, 2.0]])
    for value, words in (
        (Foreign(), r"asks for builtins\.print"),
        ([1, 2], "list"),
        (np.zeros(2), "not one table of states"),
    ):
        write_states(path, value)
        with pytest.raises(SimulatorError, match=words):
            load_init_states(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(SimulatorError, match="dzrobot libero setup"):
        load_init_states(path)
    with pytest.raises(SimulatorError, match="dzrobot libero setup"):
        load_init_states(tmp_path / "absent")


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, 0, -1], [0, 0, 0]),
        ([1, 0, 0, 0], [np.pi, 0, 0]),
        ([np.sin(0.1), 0, 0, np.cos(0.1)], [0.2, 0, 0]),
        # The seam: a hand that tilts past straight down keeps its axis and exceeds pi.
        ([np.sin(1.58), 0, 0, np.cos(1.58)], [3.16, 0, 0]),
        ([0, -np.sin(1.58), 0, np.cos(1.58)], [0, -3.16, 0]),
        ([0, 0, 0, 1.0000001], [0, 0, 0]),
    ],
)
def test_rotation_vectors_keep_the_quaternions_sign(quaternion, expected):
    given = np.array(quaternion)
    given.flags.writeable = False
    np.testing.assert_allclose(rotation_vector(given), expected, atol=1e-6)
