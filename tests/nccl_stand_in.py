"""Compile ``nccl_stand_in.c``, a library that replaces NCCL without an accelerator."""

import ctypes
import subprocess
from pathlib import Path


def compiled(folder: Path) -> Path:
    """Compile the library into ``folder``, with the file name of torch's NCCL."""
    library = folder / "libnccl.so.2"
    source = Path(__file__).with_suffix(".c")
    options = ["-shared", "-fPIC", "-O1", "-fno-strict-aliasing", "-pthread"]
    options.append(f"-Wl,-soname,{library.name}")
    subprocess.run(["cc", *options, "-o", str(library), str(source)], check=True)
    return library


def load(world, folder: Path) -> None:
    """Load the library on all ranks. Collective."""
    path = world.bcast(compiled(folder) if world.rank == 0 else None)
    ctypes.CDLL(str(path))
