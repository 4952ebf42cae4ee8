import sys

from typer.testing import CliRunner

from hpctrain.cli.main import app


def invoke():
    return CliRunner().invoke(app, ["env"])


def rows(output):
    return dict(line.split(maxsplit=1) for line in output.splitlines())


def test_it_shows_python_packages_and_mpi(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_OVERLAP", "end")
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm,tcp")
    result = invoke()
    assert result.exit_code == 0
    found = rows(result.output)
    assert found["environment"] == sys.prefix
    assert found["machine"].startswith("CPython 3.")
    assert found["torch"].startswith("2.")
    assert found["HPCTRAIN_OVERLAP"] == "end"
    assert found["OMPI_MCA_btl"] == "self,sm,tcp"
    assert found["srun"].startswith("--mpi=")
    assert "libmpi" in found["MPI"]


def test_it_says_what_started_it(monkeypatch):
    for name, text in {"STEP_ID": "0", "PROCID": "1", "STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", text)
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = rows(invoke().output)
    assert found["launcher"] == "srun --mpi=pmix"
    assert found["scheduler"] == "slurm, job 17"


def test_without_an_mpi_library_it_says_so_and_shows_the_rest(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so.40")
    result = invoke()
    assert result.exit_code == 0
    assert "cannot open shared object file" in result.output
    assert rows(result.output)["torch"]
