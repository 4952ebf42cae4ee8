"""``hpctrain examples``: write the files that guides refer to as ``examples/…``."""

from collections.abc import Mapping
from importlib.metadata import files
from pathlib import Path

import typer

from hpctrain.cli.options import argument
from hpctrain.core import atomic

FOLDER = Path("examples")
_INSTALLED = "share/hpctrain/examples/"
_KINDS = (".py", ".toml", ".md", ".ipynb", ".yml", ".json", ".lua", ".def", ".containerfile")

app = typer.Typer()


@app.command()
def examples(
    folder: Path = argument("DIR", "Directory to write into.", default=FOLDER, shown=True),
) -> None:
    """Write the examples that the manual names into a directory.

    Files that exist are not replaced.

    Examples:
      hpctrain examples

      hpctrain launch -n 4 hpctrain train examples/digits.toml
    """
    written = write_examples(folder)
    typer.echo(f"wrote {len(written)} files into {folder}; {folder / 'README.md'} describes them")


def write_examples(folder: Path = FOLDER, prefix: str = "") -> list[Path]:
    """Write the examples whose names begin with ``prefix``; existing files are not replaced.

    Raises:
        ConfigError: the directory cannot be written.
    """
    written = []
    what, elsewhere = "the directory of examples", "name another directory"
    with atomic.explained_writes(what, folder, elsewhere):
        for name, source in _sources().items():
            if name.startswith(prefix) and not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(source.read_bytes())
                written.append(folder / name)
    return written


def _sources() -> Mapping[str, Path]:
    """Return the file of each example, by name: from a clone, or from the installed package."""
    clone = Path(__file__).parents[2]
    if (clone / "setup.cfg").exists():
        found = [path for path in (clone / "examples").rglob("*") if path.suffix in _KINDS]
        return {str(path.relative_to(clone / "examples")): path for path in sorted(found)}
    installed = {str(each): each for each in files("hpctrain") or () if _INSTALLED in str(each)}
    return {
        name.partition(_INSTALLED)[2]: Path(str(each.locate()))
        for name, each in installed.items()
        if Path(name).suffix in _KINDS
    }
