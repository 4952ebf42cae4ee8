"""Programs that use only torch.distributed, under a plain launcher."""

import os
from pathlib import Path

import pytest

from hpctrain.launch.mpirun import find_mpirun
from tests.processes import AS_ROOT, ended

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
import torch.distributed as dist
dist.init_process_group("hpctrain")
total = torch.ones(3)
dist.all_reduce(total)
both = dist.new_group(backend="gloo")
dist.all_reduce(total, group=both)
print("total", total[0].item(), flush=True)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("one rank fails")
dist.barrier()
"""


@pytest.fixture
def installed(tmp_path):
    """Create a folder for PYTHONPATH with the entry points of the package."""
    text = (ROOT / "setup.cfg").read_text()
    lines = text.partition("torch.backends =\n")[2].partition("\n\n")[0]
    folder = tmp_path / "hpctrain_here-0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hpctrain_here\nVersion: 0.0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\n" + lines.strip() + "\n")
    return tmp_path


def run(folder, program, *, ranks=0, **variables):
    (folder / "program.py").write_text(program)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    environ |= {"PYTHONPATH": f"{ROOT}:{folder}"} | AS_ROOT | variables
    mpirun = find_mpirun()
    crowded = ["--oversubscribe", "--bind-to", "none"] if mpirun.is_openmpi else []
    line = [mpirun.path, *crowded, "-np", ranks] if ranks else []
    return ended([*line, "python", folder / "program.py"], env=environ, timeout=60)


@pytest.mark.launches
def test_ranks_need_no_import_and_no_address_and_a_failure_ends_all(installed):
    done = run(installed, PROGRAM, ranks=2)
    assert done.stdout.count("total 4.0") == 2, done.stderr
    assert done.returncode != 0
    assert "[rank 1] ValueError: one rank fails" in done.stderr


@pytest.mark.parametrize("module", ["core.torch_compat", "runtime.torch_backend"])
def test_the_backend_is_registered_if_a_module_of_hpctrain_imports_torch_first(installed, module):
    program = (
        "import sys\n"
        f"import hpctrain.{module}\n"
        "import torch.distributed as dist\n"
        "handler = sys.modules['torch.distributed.rendezvous']._rendezvous_handlers['env']\n"
        "print('hpctrain' in dist.Backend.backend_list, handler.__module__[:8])\n"
    )
    done = run(installed, program)
    assert done.stdout == "True hpctrain\n", done.stderr
    assert done.stderr == ""


def test_torch_starts_without_mpi(installed):
    """The entry point imports neither MPI nor the world, and a world of one rank needs no MPI."""
    program = (
        "import sys\n"
        "import torch\n"
        "loaded = [n for n in ('mpi4py', 'hpctrain.runtime.world') if n in sys.modules]\n"
        "assert not loaded, loaded\n"
        "import torch.distributed as dist\n"
        "sys.modules['mpi4py'] = None\n"
        "dist.init_process_group('hpctrain')\n"
        "total = torch.ones(2)\n"
        "dist.all_reduce(total)\n"
        "print(dist.get_backend(), total.tolist())\n"
    )
    done = run(installed, program, HPCTRAIN_ALONE="1")
    assert done.stdout == "hpctrain [1.0, 1.0]\n", done.stderr
