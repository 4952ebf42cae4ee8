"""Short tracebacks of errors in the user's code: twelve lines, with frames of that code only.

A frame belongs to the user's code unless its file is part of Python, of an installed package or of
hpctrain.
"""

import linecache
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.core.errors import HpctrainError
from hpctrain.core.python_compat import add_note

MAX_LINES = 12  # on the terminal; the log file of the rank has the whole traceback

_NUM_FRAMES = 3  # number of shown frames of the user's code, the innermost ones
_WIDTH = 300  # maximum characters of a line
_NUM_PARTS = 6  # maximum number of elements of a described tuple
_OURS = str(Path(__file__).parents[1])
_FOREIGN = (_OURS, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")})


def folded(error: BaseException, log: Path | None) -> str:
    """Return a short traceback: the user's frames, their tensors and the error.

    The text has at most ``MAX_LINES`` lines. The text is empty if no frame belongs to the user's
    code. The text is also empty if the error may be a defect of hpctrain: the caller then prints
    the whole traceback. ``log`` is the file that contains the whole traceback, or None.
    """
    lines, text = user_lines(error), "\n".join(map(str, getattr(error, "__notes__", ())))
    notes = [_cut(line) for line in text.splitlines() if line.strip()]
    frames = _frames(error)
    is_explained = isinstance(error, HpctrainError | SyntaxError) or bool(notes)
    is_fault = bool(frames) and frames[-1][0].f_code.co_filename.startswith(_OURS)
    if not is_explained and (is_fault or not lines):
        return ""
    message = "".join(traceback.format_exception_only(error)).rstrip().splitlines()
    is_ours = isinstance(error, HpctrainError)  # not cut, as the remedy is at the end
    message = [line if is_ours else _cut(line) for line in message if line.strip()]
    last = (
        f"the whole traceback: {_short(str(log))}"
        if log
        else "HPCTRAIN_LOG_DIR=FOLDER keeps all frames"
    )
    left = MAX_LINES - len(lines) - 1
    del message[len(message) - len(notes) :], notes[left - 1 :]
    return "\n".join([*lines, *message[: left - len(notes)], *notes, last])


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}…"


@contextmanager
def noted(whose: str, *values: Any) -> Iterator[None]:
    """Add a note to errors that user code raises in the block.

    The note contains ``whose``, the name of the user code, and describes ``values``, the arguments
    of the user code.
    """
    try:
        yield
    except HpctrainError:
        raise
    except Exception as error:
        given = ""
        with suppress(Exception):  # objects of users may raise when they are inspected
            given = " and ".join(map(described, values))
        add_note(error, f"{whose} was given {given}" if given else whose)
        raise


def described(value: object) -> str:
    """Return a description of a value, with type and shape of tensors, also in containers."""
    name = type(value).__name__
    name = f"a{'n' * (name[0] in 'aeiou')} {name}"
    if isinstance(value, tuple | list):
        return f"{name} of {', '.join(map(described, value))}"
    if text := _describe(value):
        return f"numpy {text}" if type(value).__module__ == "numpy" else text
    if isinstance(value, Mapping) and 0 < len(value) <= _NUM_PARTS:
        return ", ".join(f"{key} {described(each)}" for key, each in value.items())
    is_data = hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)
    return f"{name} of {len(value)} samples" if is_data and isinstance(value, Sized) else name


def user_lines(error: BaseException) -> list[str]:
    """Return a line for each frame of the user's code, and the tensors of the innermost frame."""
    frames = [each for each in _frames(error) if _is_user(each[0])]
    lines = []
    for frame, number in frames[-_NUM_FRAMES:]:
        code = frame.f_code
        source = linecache.getline(code.co_filename, number).strip()
        lines.append(f"{_short(code.co_filename)}:{number} in {code.co_name}: {source[:_WIDTH]}")
    with suppress(Exception):  # objects of users may raise when they are inspected
        if frames and (tensors := _tensors(frames[-1][0].f_locals)):
            lines.append(f"  where {tensors}")
    return lines


def layer_of(error: BaseException) -> str:
    """Return the name and description of the innermost layer whose ``forward`` raised ``error``.

    The result is empty if the user's code defines the layer, because ``user_lines`` then returns
    the line in ``forward``.
    """
    frames = [each for each, _ in _frames(error) if each.f_code.co_name == "forward"]
    layers: list[tuple[FrameType, Any]] = [(each, each.f_locals.get("self")) for each in frames]
    found = [(each, layer) for each, layer in layers if hasattr(layer, "named_modules")]
    if not found or _is_user(found[-1][0]):
        return ""
    whole, layer = found[0][1], found[-1][1]
    name = next((name for name, each in whole.named_modules() if each is layer), "")
    return f"layer {name or 'of the model'}, {_cut(str(layer).partition(chr(10))[0])}"


def _is_user(frame: FrameType) -> bool:
    """Return True if a frame belongs to the user's code.

    Code of ``python -c`` is the user's code; other code without a file, which a library has
    generated, is not.
    """
    file = frame.f_code.co_filename
    if file == "<string>":
        return frame.f_globals.get("__name__") == "__main__"
    is_compiled = file.endswith((".pyx", ".pxi"))  # modules of mpi4py and h5py
    return not (is_compiled or file.startswith(("<frozen", *_FOREIGN)) or "-packages/" in file)


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def _tensors(values: Mapping[str, Any]) -> str:
    """Return a description of the tensors and arrays among ``values``, also inside tuples."""
    found = {name: _describe(value) for name, value in values.items() if name != "self"}
    return ", ".join(f"{name} {text}" for name, text in found.items() if text)[:_WIDTH]


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list) and 0 < len(value) <= _NUM_PARTS:
        parts = [_describe(each) for each in value]
        return f"{type(value).__name__} of ({', '.join(parts)})" if all(parts) else ""
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    if not roots & {"torch", "numpy"}:
        return ""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is None or not isinstance(shape, tuple):
        return ""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
