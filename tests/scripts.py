"""Scripts of the repository outside the package, imported by their path; texts of small modules."""

import importlib.util
import multiprocessing
import sys
from contextlib import contextmanager, redirect_stdout

SEEKER = '''class Seeker:
    """Lives beside its environment, steers straight to the mark and remembers nothing."""

    def __init__(self, env):
        pass

    def reset(self, session=None, *, episode=None):
        pass

    def act(self, obs, *, session="default"):
        state, action = obs["state.state"], np.zeros(7, np.float32)
        action[:2] = np.clip((state[3:5] - state[:2]) / 0.1, -1, 1)
        return action
'''
"""A demonstrator of the point, for a module that has NumPy as ``np``."""


@contextmanager
def loaded(path):
    """Yield the script at ``path`` as a module, under the name of its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[path.stem]


def printed_elsewhere(path, calls, folder):
    """Return what ``main`` of the script at ``path`` prints in a process of its own.

    It is called with the words of each of ``calls``, which are printed before. The process is a
    copy where the test is marked ``copies``.
    """
    file = folder / "printed.txt"
    arguments = (path, calls, file)
    process = multiprocessing.get_context("spawn").Process(target=_print_to, args=arguments)
    process.start()
    process.join()
    said = file.read_text()
    assert process.exitcode == 0, said
    return said


def _print_to(path, calls, file):
    sys.path.insert(0, str(path.parent))
    with file.open("w") as out, redirect_stdout(out), loaded(path) as script:
        for words in calls:
            out.write(f"{words}\n")
            assert not script.main(words.split())
