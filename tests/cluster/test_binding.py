"""Check the cores of each rank with simulated /sys trees, and the binding of this process."""

import os
import random
import subprocess
import sys

import pytest

from hpctrain.cluster.binding import bound, gpu_of, gpu_places, share_of
from hpctrain.cluster.env import launched
from hpctrain.cluster.topology import RankFacts
from hpctrain.core.units import format_numbers, parse_numbers
from hpctrain.launch.mpiexec import Options, command, environment


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def node(root, domains, *, threads=1, gpus=(), vendor="0x10de"):
    """Write the /sys tree of a node.

    ``domains`` has the cores of each NUMA domain; a core ``c`` also has the hardware threads
    ``c + k * number of cores``. ``gpus`` has the cores next to each GPU.
    """
    cores = [core for domain in domains for core in parse_numbers(domain)]
    siblings = {core: [core + k * len(cores) for k in range(threads)] for core in cores}
    for number, domain in enumerate(domains):
        own = [thread for core in parse_numbers(domain) for thread in siblings[core]]
        write(root / f"devices/system/node/node{number}/cpulist", format_numbers(own))
    for own in siblings.values():
        for thread in own:
            file = root / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
            write(file, format_numbers(own))
    for number, cores_of_gpu in enumerate(gpus):
        own = {thread for core in parse_numbers(cores_of_gpu) for thread in siblings.get(core, ())}
        near = format_numbers(own)
        folder = root / f"bus/pci/devices/0000:{number + 1:02x}:00.0"
        for name, text in (("vendor", vendor), ("class", "0x030200"), ("local_cpulist", near)):
            write(folder / name, text)
    return range(len(cores) * threads)


def started(rank, size):
    return launched(
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        }
    )


def shares(root, mask, size, environ=()):
    found = [share_of(started(r, size), mask, dict(environ), sys=root) for r in range(size)]
    return [format_numbers(each) for each in found]


@pytest.mark.parametrize(
    ("domains", "threads", "size", "expected"),
    [
        (["0-3", "4-7"], 1, 2, ["0-3", "4-7"]),
        (["0,2,4,6", "1,3,5,7"], 1, 2, ["0,2,4,6", "1,3,5,7"]),
        (["0-3", "4-7"], 2, 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        (["0-4"], 1, 2, ["0-1", "2-4"]),
        (["0-3"], 2, 8, [""] * 8),  # a core is not divided
        (["0-3"], 1, 1, [""]),
    ],
)
def test_without_gpus_ranks_get_equal_shares_of_cores_by_numa_domain(
    tmp_path, domains, threads, size, expected
):
    assert shares(tmp_path, node(tmp_path, domains, threads=threads), size) == expected


def test_each_rank_gets_the_cores_next_to_its_gpu(tmp_path):
    # A node of Perlmutter: GPU 0 is next to the last NUMA domain.
    near = ["48-63,112-127", "32-47,96-111", "16-31,80-95", "0-15,64-79"]
    mask = node(tmp_path, ["0-15", "16-31", "32-47", "48-63"], threads=2, gpus=near)
    assert shares(tmp_path, mask, 4) == near
    assert shares(tmp_path, mask, 2) == near[:2]
    order = {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}
    assert shares(tmp_path, mask, 4, order) == near[::-1]
    assert shares(tmp_path, mask, 4, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})[0] == "0-15,64-79"


def test_ranks_whose_gpus_share_a_numa_domain_divide_its_cores(tmp_path):
    # A node of LUMI: two GPUs for each NUMA domain; the first core of each half is reserved.
    near = ["48-63", "48-63", "16-31", "16-31", "0-15", "0-15", "32-47", "32-47"]
    domains = ["0-15", "16-31", "32-47", "48-63"]
    node(tmp_path, domains, gpus=near, vendor="0x1002")
    mask = [core for core in range(64) if core % 8]
    assert shares(tmp_path, mask, 8) == [
        *("49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"),
    ]


def test_a_job_with_a_part_of_a_node_binds_to_its_own_cores(tmp_path):
    node(tmp_path, ["0-7", "8-15"], gpus=["0-7", "8-15"])
    assert shares(tmp_path, range(6, 10), 2) == ["6-7", "8-9"]
    assert shares(tmp_path, range(8), 2) == ["0-3", "4-7"]  # no core next to the second GPU


@pytest.mark.parametrize("seed", range(30))
def test_shares_are_disjoint_whole_cores_of_the_mask(tmp_path, seed):
    draw = random.Random(seed)
    num_cores, threads, size = draw.randint(1, 24), draw.randint(1, 2), draw.randint(2, 6)
    order = draw.sample(range(num_cores), num_cores)
    cut = draw.randint(0, num_cores)
    domains = [format_numbers(part) for part in (order[:cut], order[cut:]) if part]
    gpus = [draw.choice(domains) for _ in range(draw.randint(0, size))]
    whole = node(tmp_path, domains, threads=threads, gpus=gpus)
    usable = order[: draw.randint(1, num_cores)]
    mask = {thread for thread in whole if thread % num_cores in usable}
    found = [share_of(started(r, size), mask, {}, sys=tmp_path) for r in range(size)]
    taken = [thread for each in found for thread in each]
    assert len(taken) == len({*taken})
    assert {*taken} <= mask
    for each in found:
        assert {(t + num_cores) % len(whole) for t in each} <= {*each} or threads == 1


def test_gpus_are_listed_by_address_and_other_devices_are_not(tmp_path):
    node(tmp_path, ["0-3"], gpus=["2-3", "0-1"])
    write(tmp_path / "bus/pci/devices/0000:00:00.0/vendor", "0x8086")
    assert [each.cores for each in gpu_places(tmp_path)] == [(2, 3), (0, 1)]
    assert gpu_of(1, 4, {"ROCR_VISIBLE_DEVICES": "2, 3"}) == "3"
    assert gpu_of(1, 0, {}) == ""


def ranks(*pairs, host="a"):
    return [RankFacts(host=host, cores=(*cores,), share=(*share,)) for cores, share in pairs]


def masks(facts):
    return [format_numbers(each.cores) for each in bound(facts)]


FREE = [(range(4), (0, 1)), (range(4), (2, 3))]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (ranks(*FREE), ["0-1", "2-3"]),
        ([*ranks(*FREE), *ranks((range(4), ()), host="b")], ["0-1", "2-3", "0-3"]),
        # bound by the launcher
        (ranks(((0, 1), (0,)), ((2, 3), (2,))), ["0-1", "2-3"]),
        # two ranks for each socket, bound by the launcher
        (ranks(*[((0, 1), (0,)), ((0, 1), (1,)), ((2, 3), (2,)), ((2, 3), (3,))]), None),
        # a spare that replaces a rank of this host
        (ranks(((0, 1), (0,)), (range(6), (4, 5)), ((2, 3), (2,))), ["0-1", "4-5", "2-3"]),
        # the shares overlap, as by ranks with different views of their node
        (ranks((range(4), (0, 1)), (range(4), (1, 2))), None),
        # binding is disabled, or there are fewer cores than ranks
        (ranks((range(4), ()), (range(4), ())), None),
    ],
)
def test_only_ranks_without_a_binding_are_bound(facts, expected):
    assert masks(facts) == (expected or [format_numbers(each.cores) for each in facts])


def test_all_threads_of_a_process_are_bound():
    code = (
        "import os, threading\n"
        "from hpctrain.cluster.binding import bind\n"
        "done = threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"
        "core = min(os.sched_getaffinity(0))\n"
        "bind([core])\n"
        "tasks = os.listdir('/proc/self/task')\n"
        "assert len(tasks) == 2\n"
        "assert all(os.sched_getaffinity(int(task)) == {core} for task in tasks)\n"
        "done.set()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


JOIN = """
import os
import hpctrain as hvd
hvd.init()
print(",".join(map(str, sorted(os.sched_getaffinity(0)))) + "\\n", end="", flush=True)
"""


@pytest.mark.launches
@pytest.mark.requires("two-cores")
@pytest.mark.parametrize("binding", ["auto", "none"])
def test_ranks_that_no_launcher_has_bound_bind_themselves_if_the_setting_allows_it(binding):
    options = Options(binding="none", variables={"HPCTRAIN_BINDING": binding})
    line = command([sys.executable, "-c", JOIN], num_ranks=2, options=options)
    done = subprocess.run(
        line,
        check=False,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, other = ({*map(int, text.split(","))} for text in done.stdout.split())
    whole = os.sched_getaffinity(0)
    if binding == "none":
        assert one == other == whole
    else:
        assert one | other == whole
        assert not one & other
