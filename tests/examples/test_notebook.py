"""Check that the notebook of the examples trains on two ranks, from a kernel."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.conformance
@pytest.mark.launches
@pytest.mark.requires("notebook")
@pytest.mark.limit(300)
def test_two_ranks_learn_the_digits_from_a_kernel(tmp_path, monkeypatch):
    import nbformat  # noqa: PLC0415 - of the extra `docs`
    from nbclient import NotebookClient  # noqa: PLC0415

    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # `make docs` adds outputs
    # Below pytest a kernel does not capture the output of child processes.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": tmp_path}})
    client.execute()
    message = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert "on 2 ranks" in message
    assert float(message.rpartition(" of the digits are right")[0].split()[-1]) > 0.8
