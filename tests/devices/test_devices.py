"""Check that a simulated, asynchronous accelerator gives the results of the CPU.

``MCPU_SITE`` names a folder with torch_mcpu. The programs also run on real accelerators.
"""

import sys

import pytest

from hpctrain.launch import mpiexec
from tests.devices import calls, runs
from tests.processes import ended
from tests.train.starting import ROOT

pytestmark = [
    pytest.mark.launches,
    pytest.mark.conformance,
    pytest.mark.requires("mcpu"),
    pytest.mark.limit(600),
]


@pytest.mark.parametrize("case", ["whole", *runs.CASES])
def test_runs_reach_the_same_result_and_resume(tmp_path, case):
    holds(runs.__file__, tmp_path, case)


@pytest.mark.parametrize("name", calls.PROGRAMS)
def test_calls_that_take_parameters_give_the_same_values(tmp_path, name):
    holds(calls.__file__, tmp_path, name)


def holds(program, folder, case):
    line = mpiexec.command([sys.executable, program, str(folder), case], num_ranks=2)
    own = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = ended(line, timeout=500, env=mpiexec.environment() | own, cwd=ROOT)
    assert f"{case} holds" in done.stdout, done.stdout + done.stderr
