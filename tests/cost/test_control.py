"""Check the messages of the control operations against those that Open MPI counts."""

import json
import math
import pickle
import sys
from pathlib import Path

import pytest

from hpctrain.checkpoint.format.manifest import FileRecord
from hpctrain.cost import control
from hpctrain.cost.machine import Link, Machine
from hpctrain.launch import mpiexec
from tests.processes import ended


@pytest.mark.parametrize("part", control.PARTS.values(), ids=control.PARTS)
def test_rounds_grow_with_the_logarithm_of_the_ranks_and_messages_with_n_log_n(part):
    for local in (1, 4, 64):
        machines = [Machine(nodes=1 << k, ranks_per_node=local) for k in range(4, 15)]
        rounds = [part.load(one).network_rounds for one in machines]
        logs = [math.log2(one.num_ranks) for one in machines]
        assert rounds[-1] / rounds[0] <= 1.001 * max(logs[-1] / logs[0], 14 / 4)
        per_rank = [part.messages(one) / one.num_ranks for one in machines]
        assert per_rank[-1] <= 1.1 * per_rank[0] * 14 / 4


def test_a_message_takes_the_latency_and_gathered_bytes_share_a_network_adapter():
    slow = Machine(
        nodes=64, ranks_per_node=8, network=Link(1e-3, math.inf), node=Link(0, math.inf)
    )
    assert control.PARTS["stop check"].seconds(slow) == pytest.approx(6e-3)
    assert control.PARTS["start"].seconds(slow) == pytest.approx((20 + 71) * 9e-3 + 2 * 6e-3)
    narrow = Machine(nodes=64, ranks_per_node=8, network=Link(0, 1e9), node=Link(0, math.inf))
    start_s = control.PARTS["start"].seconds(narrow)
    assert start_s == pytest.approx(511 * 8 * control.PARTS["start"].gathered_bytes / 1e9)
    assert control.PARTS["recovery"].seconds(narrow) >= start_s


def test_bytes_of_a_save_are_those_of_the_gathered_objects():
    record = FileRecord((range(4000, 4001),), (range(4000, 4001),), 5000, 2**32 - 1)
    save = control.PARTS["save"]
    for predicted, sent in ((save.gathered_bytes, (1.5, 2.5, 3.5)), (save.rooted_bytes, record)):
        num_bytes = 8 + len(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))  # 8 for the length
        assert predicted == pytest.approx(num_bytes, rel=0.05)


def conformance(*sizes):
    return pytest.param(*sizes, marks=pytest.mark.conformance)


@pytest.mark.launches
@pytest.mark.requires("recovery")  # Open MPI 5, which counts messages
@pytest.mark.parametrize(
    ("nodes", "local"),
    [(1, 3), (2, 2), *(conformance(*each) for each in ((1, 2), (1, 8), (2, 1), (3, 1), (4, 2)))],
)
def test_each_part_sends_as_many_messages_as_predicted(nodes, local, tmp_path):
    launch = [sys.executable, "-m", "hpctrain", "launch", "-n", nodes * local, "--nodes", nodes]
    job = [sys.executable, Path(__file__).with_name("control_job.py"), tmp_path]
    environ = mpiexec.environment() | {"OMPI_MCA_pml_monitoring_enable": "1"}
    environ |= {"HPCTRAIN_PROBE": "off"}
    done = ended([*launch, "--", *job], env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    of_ranks = [json.loads(path.read_text()) for path in tmp_path.glob("messages-*.json")]
    assert len(of_ranks) == nodes * local
    counted = {name: sum(each[name] for each in of_ranks) for name in of_ranks[0]}
    machine = Machine(nodes=nodes, ranks_per_node=local)
    predicted = {name: part.messages(machine) for name, part in control.PARTS.items()}
    predicted["step"] *= 2  # the gradients are as small as the header
    del predicted["recovery"]  # derived
    # A new call in a long part needs no new count; a loop over ranks is far outside.
    assert counted == {name: pytest.approx(each, rel=0.1) for name, each in predicted.items()}
