"""Emulated workcells that several tests share, and which rows of a long table are run when.

``make test-arm`` runs all of them; ``pytest -m "robot and not long"`` the short ones only.
"""

import pytest

from dzrobot.envs.franka.emulated import EmulatedWorkcell


def rows(table, names, short):
    """Return the rows of ``table`` as parameters; all but ``short`` belong to the long form."""
    return [
        pytest.param(row, id=name, marks=() if name in short else pytest.mark.long)
        for row, name in zip(table, names, strict=True)
    ]


def need_libraries():
    """Skip where the client libraries of arm and cameras are not installed."""
    pytest.importorskip("franky", reason="needs franky-control (x86_64 Linux)")
    pytest.importorskip("pyrealsense2", reason="needs pyrealsense2 (x86_64 Linux)")


def need_scene():
    """Skip where the simulator of the scene with the cube is not installed."""
    from dzrobot.envs.emulators.scenes import LIFT, check_scene
    from dzrobot.errors import DzrobotError

    try:
        check_scene(LIFT)
    except DzrobotError as error:
        pytest.skip(str(error))


class KeptCell(EmulatedWorkcell):
    """Emulators that stay when an environment closes."""

    def close(self):
        pass

    def end(self):
        super().close()


def printer(request, capsys):
    """Return a function that prints a line for whoever runs the tests."""

    def write(line):
        with capsys.disabled():
            request.config.pluginmanager.getplugin("terminalreporter").write_line(line)

    return write
