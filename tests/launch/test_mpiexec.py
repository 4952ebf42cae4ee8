import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.mpiexec import Options, command, environment, ranks_per_node
from hpctrain.launch.mpirun import Mpirun, find_mpirun

OPENMPI5 = Mpirun(path=Path("/ompi5/bin/mpirun"), flavour="openmpi5", version="5.0.11")
OPENMPI4 = Mpirun(path=Path("/ompi4/bin/mpirun"), flavour="openmpi4", version="4.1.4")
MPICH = Mpirun(path=Path("/mpich/bin/mpirun"), flavour="mpich", version="5.0.2")
INTEL = Mpirun(path=Path("/intel/bin/mpirun"), flavour="intel", version="2021.11")
ALL = [OPENMPI5, OPENMPI4, MPICH, INTEL]
OPENMPI = [OPENMPI5, OPENMPI4]


def line(mpirun, num_ranks=2, **how):
    return shlex.join(command(["x", "-n", "7"], num_ranks=num_ranks, mpirun=mpirun, **how))


@pytest.fixture(params=[(2, 2), (2, 64), (4, 64)], ids=lambda p: f"{p[0]} cores of {p[1]}")
def cores(request, monkeypatch):
    """Let the mask hold some cores of a machine; the rest of the file runs on the real one."""
    mine, machine = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(1000, 1000 + mine)))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    return request.param


@pytest.mark.parametrize("mpirun", ALL)
def test_a_line_is_mpirun_its_options_the_ranks_and_the_command(mpirun):
    words = command(["x", "-n", "7"], num_ranks=2, mpirun=mpirun)
    assert words[0] == str(mpirun.path)
    assert words[words.index("-np") + 1] == "2"
    assert words[-3:] == ["x", "-n", "7"]


@pytest.mark.parametrize("mpirun", OPENMPI)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_open_mpi_oversubscribes_only_with_more_ranks_than_cores(mpirun, num_ranks, cores):
    mine, _ = cores
    assert ("OVERSUBSCRIBE" in line(mpirun, num_ranks)) == (num_ranks > mine)


@pytest.mark.parametrize("mpirun", [*OPENMPI, MPICH])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_are_bound_only_where_they_fill_the_machine(mpirun, num_ranks, cores):
    mine, machine = cores
    bound = "bind-to core" in line(mpirun, num_ranks)
    assert bound == (num_ranks == mine == machine)
    assert "bind-to core" not in line(mpirun, num_ranks, options=Options(binding="none"))


def test_two_hardware_threads_are_one_core(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 4})
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    assert mpiexec.num_cores(tmp_path) == 2


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("mpirun", OPENMPI)
def test_hosts_of_a_scheduler_are_neither_oversubscribed_nor_bound(mpirun):
    text = line(mpirun, 500, options=Options(allocated=True))
    assert "OVERSUBSCRIBE" not in text
    assert "--bind-to none" in text


@pytest.mark.parametrize("mpirun", OPENMPI)
@pytest.mark.parametrize(("uid", "allowed"), [(0, True), (1000, False)])
def test_root_is_allowed_when_it_is_root(mpirun, uid, allowed, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert ("--allow-run-as-root" in line(mpirun)) == allowed


@pytest.mark.parametrize(
    ("mpirun", "text"),
    [(OPENMPI5, "--host a:2,b:2"), (OPENMPI4, "--host a:2,b:2"), (MPICH, "-hosts a:2,b:2")],
)
def test_real_hosts_are_named_in_the_words_of_the_flavour(mpirun, text):
    assert text in line(mpirun, 4, hosts="a:2,b:2")


def test_open_mpi_hands_our_variables_to_other_hosts_and_nothing_secret(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_TRACE", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    text = line(OPENMPI5, 4, hosts="a:2,b:2")
    assert "-x HPCTRAIN_TRACE" in text
    assert "-x PATH" in text
    assert "SECRET" not in text
    assert "-x HPCTRAIN_TRACE" not in line(OPENMPI5, 4)


@pytest.mark.parametrize(
    ("mpirun", "text"),
    [
        (OPENMPI5, "-x HPCTRAIN_RANKS_PER_NODE=2"),
        (OPENMPI4, "-x HPCTRAIN_RANKS_PER_NODE=2"),
        (MPICH, "-genv HPCTRAIN_RANKS_PER_NODE 2"),
        (INTEL, "-genv HPCTRAIN_RANKS_PER_NODE 2"),
    ],
)
def test_declared_nodes_are_part_of_the_line(mpirun, text):
    assert text in line(mpirun, 4, nodes=2)
    assert "RANKS_PER_NODE" not in line(mpirun, 4)


@pytest.mark.parametrize(
    ("mpirun", "text"),
    [
        (OPENMPI5, "--output tag"),
        (OPENMPI4, "--tag-output"),
        (MPICH, "-prepend-rank"),
        (INTEL, "-prepend-rank"),
    ],
)
def test_output_is_tagged_on_request(mpirun, text):
    assert text in line(mpirun, options=Options(tag_output=True))
    assert text not in line(mpirun)


@pytest.mark.parametrize(
    ("mpirun", "text"),
    [
        (OPENMPI5, "--mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0"),
        (OPENMPI4, "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0"),
        (MPICH, "-iface eth0 -genv FI_TCP_IFACE eth0"),
        (INTEL, "-iface eth0 -genv FI_TCP_IFACE eth0"),
    ],
)
def test_a_network_interface_is_for_messages_and_the_launcher(mpirun, text, monkeypatch):
    monkeypatch.setattr(mpiexec, "check_interfaces", lambda _: None)
    assert text in line(mpirun, 4, hosts="a:2,b:2", options=Options(interfaces=("eth0",)))
    assert "if_include" not in line(mpirun, 4, hosts="a:2,b:2")


def test_open_mpi_takes_several_interfaces_and_hydra_one(monkeypatch):
    monkeypatch.setattr(mpiexec, "check_interfaces", lambda _: None)
    two = Options(interfaces=("eth0", "eth1"))
    for mpirun in OPENMPI:
        assert "btl_tcp_if_include eth0,eth1" in line(mpirun, options=two)
    for mpirun in (MPICH, INTEL):
        with pytest.raises(LaunchError, match="one network interface, got eth0,eth1"):
            line(mpirun, options=two)


def test_the_launcher_of_open_mpi_5_is_kept_off_the_loopback_interface():
    text = line(OPENMPI5, options=Options(interfaces=("lo",)))
    assert "btl_tcp_if_include lo" in text
    assert "prte" not in text


@pytest.mark.parametrize(
    ("mpirun", "text"), [*((each, "-x A=1") for each in OPENMPI), (MPICH, "-genv A 1")]
)
def test_variables_are_part_of_the_line_and_stand_above_those_that_are_set(
    mpirun, text, monkeypatch
):
    monkeypatch.setenv("HPCTRAIN_TRACE", "1")
    options = Options(variables={"A": "1", "HPCTRAIN_TRACE": "0"})
    found = line(mpirun, 4, hosts="a:2,b:2", options=options)
    assert text in found
    assert re.search(r"HPCTRAIN_TRACE[= ]0", found)
    assert "-x HPCTRAIN_TRACE " not in found


@pytest.mark.parametrize("mpirun", ALL)
def test_further_words_come_before_the_ranks(mpirun):
    options = Options(extra=("--more", "two words"))
    assert " --more 'two words' -np 2 " in line(mpirun, options=options)


@pytest.mark.parametrize("contained", [True, False])
def test_open_mpi_4_reads_no_foreign_memory_in_a_container(contained, monkeypatch):
    monkeypatch.setattr(mpiexec, "in_container", lambda: contained)
    assert ("btl_vader_single_copy_mechanism none" in line(OPENMPI4)) == contained
    assert "vader" not in line(OPENMPI5)


@given(st.integers(1, 64), st.integers(1, 64))
def test_declared_nodes_are_as_many_as_asked_for(num_ranks, nodes):
    try:
        per_node = ranks_per_node(num_ranks, nodes)
    except LaunchError:
        assert all(-(-num_ranks // k) != nodes for k in range(1, num_ranks + 1))
    else:
        assert -(-num_ranks // per_node) == nodes


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"num_ranks": 0}, "at least 1 rank, got 0"),
        ({"num_ranks": 4, "nodes": 3}, "4 ranks cannot make 3; take 1 or 2 or 4 nodes"),
        ({"num_ranks": 2, "nodes": 3}, "2 ranks cannot make 3"),
        ({"num_ranks": 5, "hosts": "a:2,b:2"}, "5 ranks and 4 places"),
        ({"num_ranks": 2, "hosts": "a:two"}, "'a:two'"),
        ({"num_ranks": 2, "hosts": "a:2,"}, "''"),
        ({"num_ranks": 2, "hosts": "a:2", "nodes": 2}, "leave one out"),
    ],
)
def test_ranks_and_places_that_do_not_fit_are_an_error(how, text):
    with pytest.raises(LaunchError, match=text):
        command(["x"], mpirun=OPENMPI5, **how)


def test_no_command_is_an_error():
    with pytest.raises(LaunchError, match="needs a command"):
        command([], num_ranks=1, mpirun=OPENMPI5)


def test_a_launch_inside_a_launch_forgets_the_outer_one():
    outer = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_x": "1"}
    assert environment(outer) == {"PATH": "/bin", "TERM": "dumb"}


@pytest.mark.parametrize(("terminal", "term"), [(True, "xterm"), (False, "dumb")])
def test_ranks_draw_only_on_a_real_terminal(terminal, term, monkeypatch):
    monkeypatch.setattr(sys.__stdout__, "isatty", lambda: terminal)
    assert environment({"TERM": "xterm"})["TERM"] == term


def test_a_launch_keeps_what_the_user_set_for_mpi():
    user = {"PATH": "/bin", "OMPI_MCA_btl": "tcp,self", "TERM": "dumb"}
    assert environment(user) == user


def test_declared_nodes_are_part_of_the_environment_on_request():
    name = "HPCTRAIN_RANKS_PER_NODE"
    assert environment({}, num_ranks=4, nodes=2)[name] == "2"
    assert environment({name: "3"}, num_ranks=4, nodes=4)[name] == "1"


FACTS = """
import json, os, sys
names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
size = next(os.environ[name] for name in names if name in os.environ)
print(json.dumps([size, os.environ.get("HPCTRAIN_RANKS_PER_NODE"), sys.argv[1:]]) + "\\n", end="")
"""


@pytest.mark.launches
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_start_with_their_arguments_and_declared_nodes(num_ranks):
    argv = [sys.executable, "-c", FACTS, "two words", "it's", "$HOME"]
    done = subprocess.run(
        command(argv, num_ranks=num_ranks, nodes=num_ranks, options=Options(binding="none")),
        env=environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(answer) for answer in done.stdout.splitlines()]
    assert answers == [[str(num_ranks), "1", argv[3:]]] * num_ranks
    assert done.stderr == ""


@pytest.mark.launches
def test_a_rank_that_is_not_bound_keeps_the_mask_of_the_launch():
    core = str(min(os.sched_getaffinity(0)))
    mask = "import os; print(*os.sched_getaffinity(0))"
    argv = command([sys.executable, "-c", mask], num_ranks=1, mpirun=find_mpirun())
    done = subprocess.run(
        ["taskset", "-c", core, *argv],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.split() == [core]
