"""``HPCTRAIN_TRACE=1``: one aligned line per collective, on standard error."""

import sys

from hpctrain.comm.observed import Call
from hpctrain.core.units import format_bytes, format_seconds


class Trace:
    """Prints each operation as ``r3 | allreduce_       |   25.0 MiB |    1.84 ms``."""

    def heard(self, call: Call) -> None:
        """Print the line of ``call``."""
        size = "" if call.num_bytes is None else format_bytes(call.num_bytes)
        cells = (f"r{call.rank}", f"{call.operation:16}", f"{size:>10}")
        sys.stderr.write(f"{' | '.join(cells)} | {format_seconds(call.seconds):>10}\n")
