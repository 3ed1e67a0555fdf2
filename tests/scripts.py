"""Scripts of the repository that are no modules of the package, imported by their path."""

import importlib.util
import sys
from contextlib import contextmanager


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
