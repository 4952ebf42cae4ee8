"""Run a script or a module as ``python`` does, below the shim."""

import builtins
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from hpctrain.core.errors import LaunchError
from hpctrain.horovod.shim.finder import install

HERE = str(Path(__file__).parent)

FAILED, INTERRUPTED = 1, 128 + signal.SIGINT
"""Exit codes of an exception that nobody catches, and of Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What is to become ``__main__``."""

    file: str
    """Its file, absolute."""
    argv0: str
    """What it finds as ``sys.argv[0]``."""
    loader: Any
    """Has ``get_code(name)``."""
    name: str
    """What the loader calls it."""
    spec: ModuleSpec | None = None
    """That of a module; a script has none."""


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script, as ``python SCRIPT ARGUMENTS`` does; ``import horovod`` finds ours.

    The process is the script's from now on, also after it has ended.

    Raises:
        LaunchError: there is no such file.
        SystemExit: the script ended by it; or 1, its exception has been printed.
    """
    path = Path(script)
    if not path.is_file():
        raise LaunchError(
            f"a script is a file, {'a folder is' if path.is_dir() else 'nothing is'} at "
            f"{path.absolute()}; a module is run by `hpctrain shim -m MODULE`"
        )
    _enter(str(path.resolve().parent))
    install()
    file = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118 - python leaves `..` in it
    program = Program(
        file=file,
        argv0=script,
        loader=SourceFileLoader("__main__", file),
        name="__main__",
    )
    _run(program, arguments)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module, as ``python -m MODULE ARGUMENTS`` does; ``import horovod`` finds ours.

    Of a package it is its ``__main__``.

    Raises:
        LaunchError: there is no such module, or it has no code.
        SystemExit: the module ended by it; or 1, its exception has been printed.
    """
    here = str(Path.cwd())
    _enter(here)
    install()
    spec = _find(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{module}.__main__")
    if spec is None or spec.origin is None or not spec.has_location:
        raise LaunchError(
            f"there is no module {module!r} to run, looked for from {here}; "
            f"`python -m {module}` must find it too"
        )
    program = Program(
        file=spec.origin,
        argv0=spec.origin,
        loader=spec.loader,
        name=spec.name,
        spec=spec,
    )
    _run(program, arguments)


def _find(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise LaunchError(f"module {module!r} cannot be found: {error}") from None


def _run(program: Program, arguments: Sequence[str]) -> None:
    before = sys.modules["__main__"]  # alive as long as we are: frames below ours belong to it
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=program.file,
        __builtins__=builtins,
        __loader__=program.loader,
        __package__=program.spec.parent if program.spec else None,
        __spec__=program.spec,
        __cached__=program.spec.cached if program.spec else None,
        __annotations__={},
    )
    sys.modules["__main__"] = main
    sys.argv = [program.argv0, *arguments]
    failure: BaseException | None = None
    try:
        exec(_code(program), vars(main))  # noqa: S102 - this is the user's program
    except SystemExit:
        raise
    except BaseException as error:
        failure = error
    if failure is not None:
        # Here and not at the top: click would make words of its own of some exceptions.
        failure.__traceback__ = without_own_frames(failure.__traceback__)
        sys.excepthook(type(failure), failure, failure.__traceback__)
        raise SystemExit(INTERRUPTED if isinstance(failure, KeyboardInterrupt) else FAILED)
    del before


def _code(program: Program) -> CodeType:
    if program.spec is None:  # not by the loader, which would write and read a .pyc of a script
        source = program.loader.get_data(program.file)
        return compile(source, program.file, "exec", dont_inherit=True)
    code: CodeType = program.loader.get_code(program.name)
    return code


def _enter(folder: str) -> None:
    """Put what Python looks through first in the place of our own program's folder."""
    if not sys.flags.safe_path:
        sys.path[:1] = [folder]


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the shim, which are not the program's."""
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(HERE):
            kept.append(trace)
        trace = trace.tb_next
    following = None
    for each in reversed(kept):
        each.tb_next = following
        following = each
    return following
