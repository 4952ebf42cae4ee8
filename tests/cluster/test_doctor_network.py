"""Check ``hpctrain doctor`` on virtual nodes: it reports faults of links with their nodes."""

import json
import re
import shutil
import subprocess

import pytest

from tests.cluster.vcluster import VirtualCluster

pytestmark = [pytest.mark.requires("cluster"), pytest.mark.launches, pytest.mark.limit(240)]

PROBE = """
import dataclasses, json
from hpctrain.cluster.env import launched
from hpctrain.doctor.host.gather import gather
from hpctrain.doctor.ranks.examine_ranks import probe

findings = [dataclasses.asdict(finding) for finding in probe(gather(lightly=True))]
if launched().rank == 0:
    print(json.dumps(findings))
"""

AHEAD_S = 40

CLOCK = f"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *now) {{
    int failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && which == CLOCK_REALTIME) now->tv_sec += {AHEAD_S};
    return failed;
}}
"""

ON_N2 = 'test "$(hostname)" = n2 && export LD_PRELOAD="$0"; exec "$@"'


def findings_of(cluster, *wrapper):
    done = cluster.run([*wrapper, "python", "-c", PROBE], timeout_s=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def wrong(findings):
    return [f"{f['check']}: {f['what']}" for f in findings if f["level"] in ("warning", "error")]


def what(findings, check):
    return "; ".join(f["what"] for f in findings if f["check"] == check)


@pytest.fixture
def fast_clock(tmp_path):
    """Compile a library that sets the clock of a program 40 s ahead."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


@pytest.mark.conformance
def test_equal_links_and_clocks_are_well():
    with VirtualCluster(nodes=3, rate="1gbit") as cluster:
        findings = findings_of(cluster)
    assert wrong(findings) == []
    assert "by 3 pairs" in what(findings, "links")
    assert "leave by eth0, TCP (3 nodes)" in what(findings, "network")


@pytest.mark.requires("c-compiler")
def test_a_slow_link_and_a_wrong_clock_are_named_with_their_nodes(fast_clock):
    with VirtualCluster(nodes=3, rate="1gbit") as cluster:
        cluster.set_rate("n1", "50mbit")
        findings = findings_of(cluster, "sh", "-c", ON_N2, fast_clock)
    *links, clock = wrong(findings)
    # On a busy machine, the links of other nodes may be slow, too.
    assert any(re.search(r"links: slow link: .*\bn1\b", link) for link in links), findings
    assert all(link.startswith("links: slow link: ") for link in links), findings
    assert re.search(r"clocks: .* but n2 is (39|40)\.\d\d s ahead", clock)
