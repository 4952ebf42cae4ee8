"""Query and control a job of the cluster."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.pace import scaled

if TYPE_CHECKING:
    from tests.cluster.slurm.cluster import SlurmCluster

ENDS = frozenset(("CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT"))
"""States that a job does not leave by itself. One that is requeued passes through none of them:
it is COMPLETING, then PENDING."""

POLL_S = 0.1


class Job:
    """Represent a job, queried with ``scontrol``."""

    def __init__(self, cluster: "SlurmCluster", number: int) -> None:
        self.id = number
        self._cluster = cluster

    def __repr__(self) -> str:
        return f"Job({self.id}: {self.state()})"

    def facts(self) -> dict[str, str]:
        """Return the fields of ``scontrol show job``: ``JobState``, ``NodeList``, ``Reason``.

        For a job array, the result has only the fields of the first listed job; see ``tasks``.
        """
        line = ["scontrol", "--oneliner", "show", "job", str(self.id)]
        text = self._cluster.run(line).stdout.partition("\n")[0]
        return dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", text))

    def state(self) -> str:
        """Return the job state: ``PENDING``, ``RUNNING``, ``COMPLETING``, ``COMPLETED``, ..."""
        return self.facts()["JobState"]

    def nodes(self) -> list[str]:
        """Return the nodes of the current or last run."""
        listed = self.facts().get("NodeList", "(null)")
        if listed == "(null)":
            return []
        return self._cluster.run(["scontrol", "show", "hostnames", listed]).stdout.split()

    def tasks(self) -> list["Job"]:
        """Return the jobs of an array by their own numbers; all pending jobs count as one."""
        line = ["scontrol", "--oneliner", "show", "job", str(self.id)]
        numbers = re.findall(r"^JobId=(\d+)", self._cluster.run(line).stdout, re.MULTILINE)
        return [Job(self._cluster, int(number)) for number in numbers]

    def wait(self, timeout_s: float = 120) -> str:
        """Wait for the end of the job, also after requeues, and return the final state.

        Raises:
            TimeoutError: the job has not ended; the message has its output.
        """
        return self._wait(ENDS, timeout_s)

    def wait_for(self, state: str, timeout_s: float = 60) -> None:
        """Wait until the job is in a state.

        Raises:
            TimeoutError: the job did not reach the state; the message has its output.
        """
        if (ended := self._wait(ENDS | {state}, timeout_s)) != state:
            raise TimeoutError(
                f"job {self.id} was to be {state}, and has ended {ended}; it printed:\n"
                f"{self.output()}"
            )

    def output(self) -> str:
        """Return the output that the job has written so far."""
        path = Path(self.facts()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def restarts(self) -> int:
        """Return the number of requeues."""
        return int(self.facts()["Restarts"])

    def exit_code(self) -> int:
        """Return the exit code of the job script."""
        return int(self.facts()["ExitCode"].partition(":")[0])

    def signal(self, name: str) -> None:
        """Send a signal such as ``USR1`` to the tasks, like ``scancel --signal``."""
        self._cluster.run(["scancel", f"--signal={name}", str(self.id)])

    def _wait(self, states: frozenset[str], timeout_s: float) -> str:
        timeout_s = scaled(timeout_s)
        deadline = time.monotonic() + timeout_s
        while (state := self.state()) not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {self.id} is {state} after {timeout_s:g} s "
                    f"(reason {self.facts().get('Reason')}); it printed:\n{self.output()}"
                )
            time.sleep(POLL_S)
        return state
