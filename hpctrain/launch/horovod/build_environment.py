"""A Python of its own for the time of a build: what it needs besides never reaches the user's."""

import os
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

from hpctrain.launch.horovod.log import Log
from hpctrain.launch.horovod.missing import Missing
from hpctrain.launch.horovod.sdist import LINE, VERSION
from hpctrain.launch.horovod.tools import Tools

PACKAGES = ("setuptools>=70.1", "packaging", "cffi>=1.4", "cloudpickle", "psutil", "pyyaml")
"""What setup.py of Horovod loads or asks for; all but setuptools it needs to run as well."""

_OURS = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU", "HOROVOD_ALLOW")
_DROPPED = {
    "HOROVOD_CMAKE",
    "HOROVOD_DEBUG",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_SKIP_COMPILE",
    "CMAKE_GENERATOR",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "PYTHONPYCACHEPREFIX",
}
"""What would build something else than was asked for, or speak to a make further up."""


class Workshop:
    """A folder with a Python that sees all packages of this one, and can have more."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        """Make it.

        Args:
            folder: an empty one.
            environ: what programs in it get, but for what would change the build.
        """
        self.folder = folder
        tree = folder / "python"
        venv.create(tree, with_pip=False, symlinks=True)
        self.python = tree / "bin" / "python"
        self.environ = _environ(os.environ if environ is None else environ, tree)
        places = sysconfig.get_paths(vars={"base": str(tree), "platbase": str(tree)})
        # In order, and with their own .pth files; what is installed here comes before them.
        seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        lines = [f"import site; site.addsitedir({path!r})" for path in seen]
        mark = Path(places["purelib"]) / "hpctrain.pth"
        mark.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def fetch(self, tools: Tools, log: Log) -> list[Missing]:
        """Let pip bring what the build needs, and the sources; return what it could not."""
        pip = [str(self.python), "-m", "pip"]
        found = []
        words = [*pip, "install", *PACKAGES, *tools.to_fetch]
        if said := log.run(words, environ=self.environ, folder=self.folder):
            programs = [f"`apt-get install {name}`" for name in tools.to_fetch]
            do = " or ".join(["a machine or a pip.conf that reaches a package index", *programs])
            names = ", ".join((*PACKAGES, *tools.to_fetch))
            found.append(Missing(f"pip fetches what the build needs ({names}): {said[-1]}", do))
            if tools.to_fetch:  # the sources do without them
                log.run(words[: -len(tools.to_fetch)], environ=self.environ, folder=self.folder)
        wanted = self.folder / "wanted.txt"
        wanted.write_text(LINE + "\n", encoding="utf-8")
        # pip asks a sdist for its name, by setup.py egg_info: that takes the packages from above.
        words = [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        words += ["--dest", str(self.folder), "-r", str(wanted)]
        if said := log.run(words, environ=self.environ, folder=self.folder):
            what = f"pip fetches the sources of Horovod {VERSION}: {said[-1]}"
            do = (
                "a machine or a pip.conf that reaches a package index, or PIP_FIND_LINKS= a "
                f"folder with horovod-{VERSION}.tar.gz"
            )
            found.append(Missing(what, do))
        return found


def _environ(environ: Mapping[str, str], tree: Path) -> dict[str, str]:
    kept = {
        name: text
        for name, text in environ.items()
        if name not in _DROPPED and not name.startswith(_OURS)
    }
    here = (str(tree / "bin"), str(Path(sys.executable).parent))
    return kept | {
        "PATH": os.pathsep.join(filter(None, (*here, environ.get("PATH", "")))),
        "VIRTUAL_ENV": str(tree),
        "PYTHONUNBUFFERED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_USER": "0",
    }
