"""Archive of a study: its results, and all files that are needed to measure it again."""

import ast
import gzip
import io
import os
import re
import shlex
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath

from hpctrain import __version__
from hpctrain.core.atomic import explained_writes, make_folder, publishing
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.units import MIB
from hpctrain.studies.points import attempts_of
from hpctrain.studies.study_file import StudyConfig
from hpctrain.studies.study_results import StudyResults

SUMS = "SHA256SUMS"
STUDY, FILES = "study", "files"  # folders of an archive

_LARGEST = MIB  # maximum bytes of a script; larger files are data
_LEAST, _RATIO = 64 * MIB, 200
"""Limit of the unpacked bytes: ``_LEAST`` or ``_RATIO`` times the archive, whichever is larger."""
_SUFFIXES = (".py", ".toml", ".sh")  # suffixes of scripts outside of the current directory
_MODULE = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")
_RECORDS = ("STUDY.toml", "environment.json", "points*.jsonl", "*.sbatch", "imported/*.csv")
_OF_ATTEMPTS = ("attempts/*/output.txt", "attempts/*/records/*")

_ABOUT = """\
# {name}

Results of a scaling study of hpctrain {version}, and the files to measure it again:

    pip install hpctrain=={version}
    hpctrain study reproduce {archive}

- `study/STUDY.toml`: command, factors and method; `study/environment.json`: versions, processor,
  commit, topology and communication plan; `study/points-N.jsonl`: results of repeat N;
  `study/attempts/`: output of each repeat and records of each step of each rank.
- `files/`: scripts and configurations of the command, below its working directory. Data are not
  included unless a script creates them.
- `{sums}`: checksums of all files, for `sha256sum -c {sums}`.
"""


def files_of(config: StudyConfig) -> dict[str, Path]:
    """Return the scripts and configurations of a study in the current directory, by their names.

    The result contains the small files that the command names. It also contains modules in the
    folders of these files: modules that a TOML file names as ``module:name``, and modules that a
    script imports. The name of a file is its path relative to the current directory, or the
    absolute path if the file is outside of this directory.
    """
    root = Path.cwd().resolve()
    words = {word for text in _commands(config) for word in shlex.split(text)}
    words |= {word.partition("=")[2] for word in words}
    left = sorted(Path(word).resolve() for word in words if _is_script(word))
    found: dict[str, Path] = {}
    while left:
        path = left.pop(0)
        is_inside = path.is_relative_to(root)
        name = (path.relative_to(root) if is_inside else path).as_posix()
        is_program = not is_inside and path.suffix not in _SUFFIXES
        if name not in found and not is_program:
            found[name] = path
            left += _imports_of(path)
    return dict(sorted(found.items()))


def checksums(config: StudyConfig) -> dict[str, str]:
    """Return the SHA-256 of each script of a study, by its name."""
    return {name: _sum_of(path.read_bytes()) for name, path in files_of(config).items()}


def export(results: StudyResults, path: Path, extra: Iterable[Path] = ()) -> int:
    """Write the archive of a study; return the number of its files.

    The archive contains the scripts of the current directory, which must be unchanged since the
    measurement. Archives of identical studies are identical.

    Args:
        results: results of the study.
        path: archive to write.
        extra: further files and directories, below the current directory.

    Raises:
        ConfigError: a file is outside of the current directory, or the archive cannot be written.
        DataError: a script is missing or was changed.
    """
    files = dict[str, Path]()
    measured: Mapping[str, str] = (results.environment or {}).get("files") or {}
    for name, digest in measured.items():
        is_there = Path(name).is_file()
        if not is_there or _sum_of(Path(name).read_bytes()) != digest:
            raise DataError(
                f"an archive must contain the files that were measured, but {name} "
                f"{'was changed' if is_there else 'is missing'} in {Path.cwd()}; restore this "
                f"file, or measure again into another folder with --out"
            )
    root = Path.cwd().resolve()
    for each in (*files_of(results.config).values(), *map(Path, measured), *extra):
        inside = each.resolve()
        if not inside.exists() or not inside.is_relative_to(root):
            raise ConfigError(
                f"files of an archive must be below the current directory, {root}, got {each}; "
                f"copy the file there, and use the relative path in the study"
            )
        for file in inside.rglob("*") if inside.is_dir() else [inside]:
            if file.is_file():
                files[f"{FILES}/{file.relative_to(root).as_posix()}"] = file
    for pattern in (*_RECORDS, *_OF_ATTEMPTS):
        for file in results.directory.glob(pattern):
            files[f"{STUDY}/{file.relative_to(results.directory).as_posix()}"] = file
    name = results.config.study.name
    about = _ABOUT.format(name=name, version=__version__, archive=path.name, sums=SUMS)
    with explained_writes("an archive", path, "name another file with --out"):
        make_folder(path.absolute().parent)
        contents = {n: file.read_bytes() for n, file in files.items()}
        contents["README.md"] = about.encode()
        _write(path, PurePosixPath(name), dict(sorted(contents.items())))
    return len(contents)


def unpack(contents: Mapping[str, bytes], place: Path) -> None:
    """Write the contents of an archive into a new folder.

    Raises ``ConfigError``: the folder cannot be written.
    """
    with explained_writes("the folder of a reproduction", place, "name another one with --out"):
        for name, text in contents.items():
            make_folder((place / name).parent)
            (place / name).write_bytes(text)


def read(archive: Path) -> dict[str, bytes]:
    """Return the contents of an archive by name.

    Raises ``DataError``: a checksum differs, or the archive contains links, paths outside of its
    folder, or files that are far larger than the archive.
    """
    found: dict[str, bytes] = {}
    unsafe = set[str]()
    try:
        with tarfile.open(archive, "r:gz") as file:
            for member in _members(file, max(_LEAST, _RATIO * archive.stat().st_size)):
                path = PurePosixPath(member.name)
                name = "/".join(path.parts[1:]) or member.name
                data = file.extractfile(member) if member.isfile() else None
                found[name] = data.read() if data else b""
                if data is None or path.is_absolute() or ".." in path.parts:
                    unsafe.add(name)
        lines = found[SUMS].decode().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        sums[SUMS] = _sum_of(found[SUMS])
    except (OSError, EOFError, ValueError, KeyError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            f"{archive} must be a complete archive of `hpctrain study export`, but reading "
            f"failed: {error!r}; copy it again"
        ) from None
    changed = sums.items() ^ {name: _sum_of(data) for name, data in found.items()}.items()
    if wrong := unsafe | {name for name, _ in changed}:
        raise DataError(
            f"an archive must contain the files of its {SUMS}, but {min(wrong)} of {archive} "
            f"differs; copy it again"
        )
    return found


def _members(file: tarfile.TarFile, limit: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive. Raises ``ValueError`` if they exceed ``limit`` bytes."""
    for member in file:
        limit -= member.size
        if limit < 0:
            raise ValueError(f"{member.name} and the files before it are too large")
        yield member


def _commands(config: StudyConfig) -> Iterator[str]:
    for attempt in attempts_of(config):
        launcher, run, _ = config.filled(attempt.names(config.study.mode, Path("attempt")))
        yield shlex.join([*launcher, *run])


def _is_script(word: str) -> bool:
    return os.path.isfile(word) and os.path.getsize(word) <= _LARGEST  # noqa: PTH113,PTH202 - a word may be too long for a path


def _imports_of(path: Path) -> list[Path]:
    """Return the modules that a script or TOML file names, if they are in the same folder."""
    if path.suffix not in (".py", ".toml"):
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    names = set(_MODULE.findall(text)) if path.suffix == ".toml" else _imported(text)
    found: list[Path] = []
    for name in sorted(names):
        module, package = path.with_name(f"{name}.py"), path.with_name(name)
        found += [module] if module.is_file() else []
        found += sorted(package.rglob("*.py")) if (package / "__init__.py").is_file() else []
    return found


def _imported(text: str) -> set[str]:
    """Return the top-level names of the modules that a script imports."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return set()
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [node.module] if node.module else [each.name for each in node.names]
    return {name.partition(".")[0] for name in names}


def _sum_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def _write(path: Path, folder: PurePosixPath, contents: Mapping[str, bytes]) -> None:
    """Write a compressed tar file that stores no times and no owners of files."""
    sums = "".join(f"{_sum_of(data)}  {name}\n" for name, data in contents.items())
    with (
        publishing(path) as part,
        part.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as file,
    ):
        for name, data in {SUMS: sums.encode(), **contents}.items():
            member = tarfile.TarInfo(str(folder / name))
            member.size, member.mode = len(data), 0o644
            file.addfile(member, io.BytesIO(data))
