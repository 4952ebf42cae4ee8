"""Check that site profiles of version 1.0 stay readable.

``hpctrain site init`` wrote ``golden/site.toml``; then each key got a value. The file must not be
rewritten.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.launch import site as sites

GOLDEN = Path(__file__).parent / "golden/site.toml"
JOB = {
    "account": "project_1",
    "account_form": "project_N",
    "partition": "gpu",
    "options": ["--constraint=gpu"],
    "cpu_bind": "threads",
    "srun": ["--mpi=pmix"],
    "modules": ["openmpi/5.0"],
    "variables": {"MIOPEN_USER_DB_PATH": "/tmp/$USER"},
    "scratch": ["$SCRATCH"],
}
NODE = {
    "cpus": 16,
    "mem": "64G",
    "gpus": 2,
    "numa_domains": 2,
    "adapters": 1,
    "network": "slingshot",
    "gpu_cores": ["8-15", "0-7"],
}


def test_the_golden_profile_is_unchanged_and_read():
    assert hashlib.sha256(GOLDEN.read_bytes()).hexdigest()[:16] == "ceab541a5b0ddd10"
    found = asdict(sites.read(str(GOLDEN)))
    assert (found["name"], found["title"]) == ("golden", "Golden")
    assert found["recognize"] == ["host=login*.golden", "CLUSTER=golden"]
    assert found["sources"] == ["https://docs.example/jobs, 2026-11-30"]
    assert found["job"] == found["job"] | JOB
    assert found["node"] == found["node"] | NODE


def test_a_newer_profile_is_refused_with_the_version_that_reads_it(tmp_path):
    text = GOLDEN.read_text().replace("version = 1", "version = 2").replace('"1.0"', '"1.7"')
    file = tmp_path / "site.toml"
    file.write_text(f"new_key = 1\n{text}")
    with pytest.raises(ConfigError, match="must be at most 1, got 2; install hpctrain 1"):
        sites.read(str(file))
