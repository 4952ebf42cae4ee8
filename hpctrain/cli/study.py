"""``hpctrain study``: scaling studies."""

import typer

from hpctrain.cli.study_report import compare, report
from hpctrain.cli.study_run import init, run

study = typer.Typer(
    name="study",
    help="Measure how a training scales, and report it so that others can believe it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
study.command()(init)
study.command()(run)
study.command()(report)
study.command()(compare)
