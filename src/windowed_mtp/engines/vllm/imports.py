"""Run something right after a module is imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook`` with a module as soon as it has been imported; at once if it already was.

    Parameters
    ----------
    name : str
        Full name of the module.
    hook : callable
        Called once with the module.
    """
    if name in sys.modules:
        hook(sys.modules[name])
    elif not any(isinstance(finder, _Waiting) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting(name, hook))


def forget(name: str) -> None:
    """Take back what waits for a module's import; nothing happens if nothing does.

    Parameters
    ----------
    name : str
        Full name of the module.
    """
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not (isinstance(finder, _Waiting) and finder.name == name)
    ]


class _Waiting(MetaPathFinder):
    """A finder that steps aside for one module and wraps its loader."""

    def __init__(self, name: str, hook: Hook) -> None:
        self.name = name
        self.hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute, hook = spec.loader.exec_module, self.hook

            def execute_then_hook(module: ModuleType) -> None:
                execute(module)
                hook(module)

            spec.loader.exec_module = execute_then_hook  # type: ignore[method-assign]
        return spec
