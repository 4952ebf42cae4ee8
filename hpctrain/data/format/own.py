"""Datasets whose values lie in their own HDF5 file, not where the file points to."""

from typing import Any

import h5py

UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError)
"""What a damaged file leads to, in HDF5 and here."""

_MOST_LINKS = 16
"""Soft links that lead from one to the next."""


def own_dataset(file: h5py.File, path: str) -> Any:
    """Return what a path in an HDF5 file names, which is a dataset, as a rule.

    A file can name other files of this machine, by links, as storage of a dataset, or as sources
    of a virtual one; who made it could have them read. None of them is opened.

    Raises:
        KeyError: there is nothing of this name.
        ValueError: it is in another file.
    """
    found = file[_resolved(file, path)]
    if isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
        where = "external storage" if found.external else "a virtual dataset"
        raise ValueError(_refusal(path, where))
    return found


def _resolved(file: h5py.File, path: str) -> str:
    """Follow soft links by hand: HDF5 would go on into other files."""
    left, at, num_links = _parts(path), "/", 0
    while left:
        name = left.pop(0)
        group = file[at]
        if not isinstance(group, h5py.Group):
            raise KeyError(f"{at} is no group, so there is no {path}")
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            num_links += 1
            if num_links > _MOST_LINKS:
                raise ValueError(f"/{path.lstrip('/')} is behind more than {_MOST_LINKS} links")
            at = "/" if link.path.startswith("/") else at
            left = [*_parts(link.path), *left]
        elif isinstance(link, h5py.HardLink):
            at = f"{at.rstrip('/')}/{name}"
        elif link is None:
            raise KeyError(f"there is no {path}")
        else:
            raise ValueError(_refusal(path, "an external link"))
    return at


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _refusal(path: str, what: str) -> str:
    return (
        f"values lie in the file that names them, /{path.lstrip('/')} is {what}; copy them into "
        f"the file, or take the file that has them"
    )
