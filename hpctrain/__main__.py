"""``python -m hpctrain`` is ``hpctrain``."""

from hpctrain.cli.main import main

main()
