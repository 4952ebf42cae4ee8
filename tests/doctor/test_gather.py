"""Check the gathering of facts from a machine."""

from unittest.mock import Mock

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.doctor.checks.facts import Reached
from hpctrain.doctor.host import gather as module
from hpctrain.doctor.host.gather import gather, gpus_of, libraries_in, reached, srun_types_of
from tests.doctor.healthy import NVLINK


def test_a_light_gather_omits_facts_that_are_equal_on_a_node():
    facts = gather({"CUDA_VISIBLE_DEVICES": "0, 3"}, lightly=True)
    assert facts.mpi.library is None
    assert facts.cores.mask
    assert facts.visible.names == ("0", "3")
    assert facts.network.copy_error == ""


def test_horovod_is_loaded_if_ranks_use_it(monkeypatch):
    refusal, wanted = LaunchError("it says: no; build"), {"HPCTRAIN_ENGINE": "horovod"}
    monkeypatch.setattr(module, "load", Mock())
    monkeypatch.setattr(module, "check_import", Mock(side_effect=refusal))
    monkeypatch.setattr(module, "version_of", lambda _: None)
    assert module._horovod_error({}) == ""
    assert "but is not; hpctrain horovod build" in module._horovod_error(wanted)
    monkeypatch.setattr(module, "version_of", lambda _: "0.28.1")
    assert module._horovod_error(wanted) == str(refusal)


@pytest.mark.parametrize(
    "text",
    [
        "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix (pmix_v4)\n",
        "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugins: pmix_v4\n",
        "srun: MPI types are...\nnone\npmi2\npmix\npmix_v4\n",
    ],
)
def test_the_types_of_srun_are_parsed_for_old_and_new_slurm(text):
    assert {"none", "pmi2", "pmix"} <= set(srun_types_of(text))
    assert "types" not in srun_types_of(text)


def tree(root, version="40.30.6"):
    """Make an installed MPI: a file with links to it, a linker script, and its mpirun."""
    (root / "lib").mkdir(parents=True)
    (root / "bin").mkdir()
    library = root / "lib" / f"libmpi.so.{version}"
    library.write_bytes(b"")
    (root / "lib" / f"libmpi.so.{version.partition('.')[0]}").symlink_to(library.name)
    (root / "lib" / "libmpi.so").symlink_to(library.name)
    (root / "lib" / "libmpi_mpifh.so.40").write_bytes(b"")
    (root / "bin" / "mpirun").write_text("#!/bin/sh\n")
    (root / "bin" / "mpirun").chmod(0o755)
    return library


def test_a_folder_has_each_mpi_once(tmp_path):
    library = tree(tmp_path)
    assert libraries_in(tmp_path / "lib") == [library]
    (tmp_path / "lib/libmpich.so.12").write_bytes(b"")
    assert set(libraries_in(tmp_path / "lib")) == {library, tmp_path / "lib/libmpich.so.12"}
    assert libraries_in(tmp_path / "none") == []


def test_a_text_for_the_linker_is_no_library(tmp_path):
    (tmp_path / "libmpi.so").write_text("INPUT(libmpi.so.40)")
    assert libraries_in(tmp_path) == []


def test_paths_lead_to_libraries(tmp_path):
    library, other = tree(tmp_path / "a"), tree(tmp_path / "b", "12.2.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").symlink_to(tmp_path / "b/bin/mpirun")
    found = reached({"LD_LIBRARY_PATH": f"/none:{tmp_path}/a/lib:", "PATH": f"{tmp_path}/bin"})
    assert found == (
        Reached(library=library, by="LD_LIBRARY_PATH"),
        Reached(library=other, by="mpirun", program=tmp_path / "bin/mpirun"),
    )
    assert reached({"PATH": "/none"}) == ()


def smi_in(folder, body):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_the_output_of_nvidia_smi_is_parsed(tmp_path):
    (tmp_path / "topology").write_text(NVLINK.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1", 1))
    output = gpus_of(
        smi_in(
            tmp_path,
            f'case "$1" in\n topo) cat {tmp_path}/topology ;;\n --q*) echo GPU-a; echo GPU-b ;;\n'
            ' *) echo "| NVIDIA-SMI 570.86  Driver Version: 570.86.15   CUDA Version: 12.8 |"\n'
            "esac",
        )
    )
    assert (output.driver, output.cuda, output.error) == ("570.86.15", "12.8", "")
    assert output.uuids == ("GPU-a", "GPU-b")
    assert output.topology == NVLINK


def test_message_of_a_failing_driver_is_reported(tmp_path):
    output = gpus_of(smi_in(tmp_path, "echo Failed to initialize NVML: version mismatch; exit 18"))
    assert (output.driver, output.error) == ("", "Failed to initialize NVML: version mismatch")
    assert gpus_of({"PATH": str(tmp_path / "nothing")}).error == ""
