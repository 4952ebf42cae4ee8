"""``python -m tests.cluster.vcluster``: exit code 0 if this machine supports it, else 77."""

import sys

from tests.cluster.vcluster.check import obstacle

SKIPPED = 77  # exit code of Automake for unsupported machines

if __name__ == "__main__":
    reason = obstacle()
    sys.stdout.write(f"{reason or 'virtual clusters work here'}\n")
    sys.exit(SKIPPED if reason else 0)
