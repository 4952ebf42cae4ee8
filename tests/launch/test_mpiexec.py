import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.mpiexec import (
    Options,
    check_interfaces,
    command,
    environment,
    ranks_per_node,
    read_hostfile,
    rendezvous,
)
from hpctrain.launch.mpirun import Mpirun, find_mpirun
from hpctrain.launch.program import resolve
from tests.processes import ended

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
    """Simulate an affinity mask with some cores of a machine."""
    mine, machine = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(1000, 1000 + mine)))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    return request.param


@pytest.mark.parametrize("mpirun", OPENMPI)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_open_mpi_oversubscribes_only_with_more_ranks_than_cores(mpirun, num_ranks, cores):
    mine, _ = cores
    assert ("OVERSUBSCRIBE" in line(mpirun, num_ranks)) == (num_ranks > mine)


@pytest.mark.parametrize("mpirun", [*OPENMPI, MPICH])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_are_bound_only_if_they_use_every_core_of_the_machine(mpirun, num_ranks, cores):
    mine, machine = cores
    bound = "bind-to core" in line(mpirun, num_ranks)
    assert bound == (num_ranks == mine == machine)
    unbound = line(mpirun, num_ranks, options=Options(binding="none"))
    assert "bind-to core" not in unbound
    assert re.search("HPCTRAIN_BINDING[= ]none", unbound)
    assert "HPCTRAIN_BINDING" not in line(mpirun, num_ranks)


def test_two_hardware_threads_are_one_core(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 4})
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    assert mpiexec.num_cores(tmp_path) == 2


HOSTS = {"num_ranks": 4, "hosts": "a:2,b:2"}
ETH0 = {**HOSTS, "options": Options(interfaces=("eth0",))}
LO = {"options": Options(interfaces=("lo",))}
TWO = {"options": Options(interfaces=("eth0", "eth1"))}
SET = {**HOSTS, "options": Options(variables={"A": "1", "HPCTRAIN_TRACE": "0"})}
TAG = {"options": Options(tag_output=True)}
NODES = {"num_ranks": 4, "nodes": 2}
MORE = {"options": Options(extra=("--more", "two words"))}
LENT = {"num_ranks": 500, "options": Options(allocated=True)}
HYDRA = [MPICH, INTEL]


@pytest.mark.parametrize(
    ("mpiruns", "how", "text", "absent"),
    [
        (OPENMPI, {}, "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK ", "RANKS_PER_NODE"),
        (HYDRA, {}, "LOCAL_RANK=$MPI_LOCALRANKID ", "RANKS_PER_NODE"),
        (HYDRA, {}, "trap : HUP", "OMPI_"),
        (HYDRA, {"num_ranks": 1}, "-np 1 sh -c 'export RANK=$PMI_RANK ", "trap"),
        (ALL, MORE, "--more 'two words' -np 2", "SECRET"),
        (OPENMPI, LENT, "--bind-to none", "OVERSUBSCRIBE"),
        (OPENMPI, HOSTS, "--host a:2,b:2", "SECRET"),
        (OPENMPI, HOSTS, "-x HPCTRAIN_TRACE", "if_include"),
        (OPENMPI, HOSTS, "-x PATH", "prte"),
        (OPENMPI, {}, "--bind-to", "-x HPCTRAIN_TRACE"),
        (HYDRA, HOSTS, "-hosts a:2,b:2", "-iface"),
        (OPENMPI, NODES, "-x HPCTRAIN_RANKS_PER_NODE=2", "-genv"),
        (HYDRA, NODES, "-genv HPCTRAIN_RANKS_PER_NODE 2", "-x"),
        ([OPENMPI5], TAG, "--output tag", "--tag-output"),
        ([OPENMPI4], TAG, "--tag-output", "--output"),
        (HYDRA, TAG, "-prepend-rank", "tag"),
        ([OPENMPI5], ETH0, "--mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0", "oob"),
        ([OPENMPI4], ETH0, "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0", "prte"),
        (HYDRA, ETH0, "-iface eth0 -genv FI_TCP_IFACE eth0", "if_include"),
        (OPENMPI, TWO, "btl_tcp_if_include eth0,eth1", "-iface"),
        # Open MPI 5's launcher rejects the loopback interface
        ([OPENMPI5], LO, "btl_tcp_if_include lo", "prte"),
        (OPENMPI, SET, "-x A=1 -x HPCTRAIN_TRACE=0", "-x HPCTRAIN_TRACE "),
        (HYDRA, SET, "-genv A 1 -genv HPCTRAIN_TRACE 0", "-x"),
    ],
)
def test_options_are_translated_for_each_launcher(mpiruns, how, text, absent, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_TRACE", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setattr(mpiexec, "check_interfaces", lambda _: None)
    for mpirun in mpiruns:
        found = line(mpirun, **how)
        assert found.startswith(f"{mpirun.path} ")
        assert found.endswith("x -n 7")
        assert text in found
        assert absent not in found


def test_open_mpi_on_one_host_skips_the_ofi_fabric_unless_requested(monkeypatch):
    for may in (True, False):
        monkeypatch.setattr(mpiexec, "may_spare_ofi", lambda may=may: may)
        for mpirun in ALL:
            mine = Options(extra=("--mca", "btl", "self,sm"))
            assert ("btl '^ofi'" in line(mpirun)) == (may and mpirun in OPENMPI)
            assert "^ofi" not in line(mpirun, **HOSTS) + line(mpirun, options=mine)


def test_recovery_needs_open_mpi_5(monkeypatch):
    monkeypatch.setattr(mpiexec, "may_spare_ofi", lambda: True)
    recover = Options(recover=True)
    found = line(OPENMPI5, options=recover)
    assert "--with-ft ulfm" in found
    assert "btl self,sm,tcp" in found
    assert "-x HPCTRAIN_RECOVER=1" in found
    for mpirun in (OPENMPI4, *HYDRA):
        with pytest.raises(LaunchError, match=f"must be Open MPI 5, but {mpirun.path} is"):
            line(mpirun, options=recover)


def test_hydra_takes_only_one_network_interface(monkeypatch):
    monkeypatch.setattr(mpiexec, "check_interfaces", lambda _: None)
    for mpirun in HYDRA:
        with pytest.raises(LaunchError, match="one network interface, got eth0,eth1"):
            line(mpirun, **TWO)


@pytest.mark.parametrize(("uid", "allowed"), [(0, True), (1000, False)])
def test_open_mpi_may_run_as_root_only_for_root(uid, allowed, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    for mpirun in OPENMPI:
        assert ("--allow-run-as-root" in line(mpirun)) == allowed


def test_ranks_without_access_to_each_others_memory_get_settings(monkeypatch):
    for settings in ({}, {"A": "1"}):
        monkeypatch.setattr(mpiexec, "copies_off", lambda settings=settings: settings)
        for mpirun in ALL:
            assert ("A=1" in line(mpirun) or "A 1" in line(mpirun)) == bool(settings)
        mine = line(MPICH, options=Options(variables={"A": "2"}))
        assert "-genv A 2" in mine
        assert "A 1" not in mine


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_per_node_gives_the_requested_number_of_nodes(num_ranks, nodes):
    try:
        per_node = ranks_per_node(num_ranks, nodes)
    except LaunchError:
        assert all(-(-num_ranks // k) != nodes for k in range(1, num_ranks + 1))
    else:
        assert -(-num_ranks // per_node) == nodes


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"num_ranks": 0}, "at least 1, got 0"),
        ({"num_ranks": 4, "nodes": 3}, "4 ranks cannot make 3 such nodes; use 1 or 2 or 4 nodes"),
        ({"num_ranks": 2, "nodes": 3}, "2 ranks cannot make 3"),
        ({"num_ranks": 5, "hosts": "a:2,b:2"}, "5 ranks and 4 slots"),
        ({"num_ranks": 2, "hosts": "a:two"}, "'a:two'"),
        ({"num_ranks": 2, "hosts": "a:2,"}, "''"),
        ({"num_ranks": 2, "hosts": "a:2", "nodes": 2}, "omit one"),
    ],
)
def test_ranks_and_slots_that_do_not_match_are_an_error(how, text):
    with pytest.raises(LaunchError, match=text):
        command(["x"], mpirun=OPENMPI5, **how)


def test_the_environment_of_a_launch_omits_only_variables_of_an_outer_launch():
    user = {"HOME": "/h", "PATH": "/bin", "OMPI_MCA_btl": "tcp,self", "TERM": "dumb"}
    assert environment(user) == user
    kept = {"HOME": "/h", "TERM": "dumb"}
    inside = kept | {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_x": "1"}
    assert environment(inside) == kept
    assert environment(inside | dict.fromkeys(mpiexec.OF_TORCH, "1")) == kept
    assert environment(kept | {"RANK": "1"}) == kept | {"RANK": "1"}


def test_torch_rendezvous_is_at_the_first_host_or_at_the_users_address(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous(None)["MASTER_ADDR"] == "127.0.0.1"
    assert rendezvous("a:2,b:2")["MASTER_ADDR"] == "a"
    assert rendezvous(None, allocated=True)["MASTER_ADDR"] == socket.gethostname()
    monkeypatch.setenv("MASTER_PORT", "9")
    assert rendezvous("a")["MASTER_PORT"] == "9"


@pytest.mark.parametrize(("terminal", "term"), [(True, "xterm"), (False, "dumb")])
def test_ranks_draw_progress_bars_only_on_a_real_terminal(terminal, term, monkeypatch):
    monkeypatch.setattr(sys.__stdout__, "isatty", lambda: terminal)
    assert environment({"TERM": "xterm"})["TERM"] == term


FACTS = """
import json, os, sys
names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
size = next(os.environ[name] for name in names if name in os.environ)
print(json.dumps([size, os.environ.get("HPCTRAIN_RANKS_PER_NODE"), sys.argv[1:]]) + "\\n", end="")
"""


@pytest.mark.launches
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_start_with_their_arguments_and_declared_nodes(num_ranks):
    argv = [sys.executable, "-c", FACTS, "two words", "it's", "$HOME"]
    done = ended(
        command(argv, num_ranks=num_ranks, nodes=num_ranks, options=Options(binding="none")),
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(answer) for answer in done.stdout.splitlines()]
    assert answers == [[str(num_ranks), "1", argv[3:]]] * num_ranks
    assert done.stderr == ""


@pytest.mark.launches
def test_an_unbound_rank_keeps_the_affinity_mask_of_the_launch():
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


TEXT = """\
# the nodes of this job

node-1.cluster slots=4   # with a comment
10.0.0.2 slots = 2
c:3
d
"""


def test_host_files_of_horovod_and_the_launchers_are_read(tmp_path):
    (tmp_path / "hosts").write_text(TEXT)
    assert read_hostfile(tmp_path / "hosts") == "node-1.cluster:4,10.0.0.2:2,c:3,d:1"


@pytest.mark.parametrize(
    "line",
    ["a slots=", "a slots=two", "a slots=2 b", "a b", "slots=2", "a:2:3", "a slots=-1", "a,b"],
)
def test_an_invalid_line_of_a_host_file_is_reported_with_its_number(line, tmp_path):
    (tmp_path / "hosts").write_text(f"fine slots=2\n{line}\n")
    with pytest.raises(LaunchError, match=rf"host slots=N.*{line}.* line 2 of .*hosts; correct"):
        read_hostfile(tmp_path / "hosts")


def test_a_file_without_hosts_is_an_error(tmp_path):
    (tmp_path / "hosts").write_text("# nobody\n\n")
    with pytest.raises(LaunchError, match="has none"):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "nowhere")
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "hosts")


def test_an_interface_must_be_on_this_host():
    check_interfaces(["lo", "10.0.0.0/24"])
    with pytest.raises(LaunchError, match=r"'eth99' does not exist on this host, which has .*lo"):
        check_interfaces(["lo", "eth99"])


@pytest.mark.parametrize(
    ("argv", "resolved"),
    [
        (["python", "x.py", "-n", "3"], [sys.executable, "x.py", "-n", "3"]),
        (["python3", "-c", "pass"], [sys.executable, "-c", "pass"]),
        (["hpctrain", "train", "a.toml"], [sys.executable, "-m", "hpctrain", "train", "a.toml"]),
        (["sh", "-c", "true"], [shutil.which("sh"), "-c", "true"]),
    ],
)
def test_bare_names_are_resolved_in_this_environment(argv, resolved):
    assert resolve(argv) == resolved


@pytest.mark.parametrize("name", ["train.py", "with blank.py", "quo'te.py"])
def test_a_script_runs_under_this_interpreter(tmp_path, name):
    script = tmp_path / name
    script.touch()
    assert resolve([str(script), "--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]


@pytest.mark.parametrize("name", ["missing.py", "no-such-program"])
def test_a_missing_program_is_named_in_the_error(name):
    with pytest.raises(LaunchError, match=f"'{name}'"):
        resolve([name])


def test_spares_are_added_to_the_ranks_and_need_recovery():
    found = line(OPENMPI5, options=Options(recover=True, spares=1))
    assert "-np 3 " in found
    assert "-x HPCTRAIN_SPARES=1" in found
    with pytest.raises(LaunchError, match="without --recover"):
        line(OPENMPI5, options=Options(spares=1))
