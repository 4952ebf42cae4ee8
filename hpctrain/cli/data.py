"""``hpctrain data``: make data sets, look at them, keep them whole."""

import typer

from hpctrain.cli.data_pack import pack
from hpctrain.cli.data_tools import info, repair, reshard, split, verify

EXAMPLES = """
For instance:

  hpctrain data pack photos/ data/train        a folder of images for each class

  mpirun -n 8 hpctrain data pack big.h5 data/train --field x=/images --field y=/labels

  hpctrain data info data/train

  hpctrain data verify data/train              exit code 1 if anything is damaged
"""

data = typer.Typer(
    name="data",
    help="Make sharded HDF5 data sets, look at them, check and change them.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
for command in (pack, info, verify, repair, reshard, split):
    data.command()(command)
