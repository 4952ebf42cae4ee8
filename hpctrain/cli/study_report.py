"""``hpctrain study report, compare``: what scaling studies say."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from hpctrain.core.errors import ConfigError

SLOWER = 1  # exit code of compare --fail-slower


def report(
    directory: Annotated[
        Path, Argument(metavar="DIR", help="The folder of a study.", show_default=False)
    ],
    *,
    machine: Annotated[
        Path | None,
        Option(metavar="FILE", help="A machine in TOML, for a bound.", show_default="none"),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Folder to write into.", show_default="DIR")
    ] = None,
) -> None:
    """Write the page report.html, figures as PNG and SVG, and print a summary.

    The page opens without a network. Its checklist names the rules for reports
    on performance that the study keeps, and what is missing for the others.

    For instance:

      hpctrain study report studies/digits

      hpctrain study report studies/digits --machine cluster.toml --out /tmp/digits
    """
    from rich.console import Console  # noqa: PLC0415

    from hpctrain.cost.machine import Machine  # noqa: PLC0415
    from hpctrain.studies.report import summary_of, write_report  # noqa: PLC0415
    from hpctrain.studies.results import StudyResults  # noqa: PLC0415

    results = StudyResults.read(directory)
    if machine is not None:
        results = results.beside(Machine.read(machine))
    console = Console(highlight=False, markup=False)
    console.print(summary_of(results))
    page, *figures = write_report(results, out or directory)
    console.print(f"wrote {page}, and {len(figures)} figures in plots beside it", soft_wrap=True)


def compare(
    first: Annotated[
        Path, Argument(metavar="A", help="The folder of a study.", show_default=False)
    ],
    second: Annotated[
        Path, Argument(metavar="B", help="What is compared with A.", show_default=False)
    ],
    *,
    alpha: Annotated[
        float,
        Option(min=1e-6, max=0.5, metavar="P", help="How often equal studies may differ."),
    ] = 0.05,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write a page too.", show_default="none")
    ] = None,
    fail_slower: Annotated[
        bool, Option("--fail-slower", help="Exit code 1 if B is slower beyond noise.")
    ] = False,
) -> None:
    """Compare the time of a step at the points that two studies share.

    Ratios of B to A, with intervals of a paired bootstrap over repeats.

    For instance:

      hpctrain study compare studies/before studies/after

      hpctrain study compare studies/before studies/after --html ratio.html --fail-slower
    """
    from rich.console import Console  # noqa: PLC0415

    from hpctrain.studies.comparison import StudyComparison  # noqa: PLC0415
    from hpctrain.studies.report import write_page  # noqa: PLC0415
    from hpctrain.studies.results import StudyResults  # noqa: PLC0415

    found = StudyComparison(StudyResults.read(first), StudyResults.read(second), alpha)
    Console(highlight=False, markup=False).print(found.summary())
    if html is not None:
        write_page(html, found.page())
    if fail_slower and all(verdict.startswith("too few") for _, verdict in found.verdicts):
        raise ConfigError(
            "--fail-slower needs more repeats, or a larger --alpha, to find anything"
        )
    if fail_slower and found.slower:
        raise Exit(SLOWER)
