"""Check that files of each version of each format are kept in the tests.

A module of hpctrain that reads a format calls ``fault_of`` of ``core.formats``, and its constant
``VERSION`` is the newest version of the format. Tests next to the files read them.
"""

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = {
    "hpctrain.checkpoint.format.manifest": [
        *("checkpoint/golden/v1/manifest.json", "checkpoint/golden/v2/manifest.json"),
        "checkpoint/golden/v3/manifest.json",
    ],
    "hpctrain.comm.plan.planning": ["train/golden/run-v1/plan.json"],
    "hpctrain.data.data_split": ["data/golden/split.npz"],
    "hpctrain.data.format.dataset_manifest": ["data/golden/stamped/manifest.json"],
    # The state of a loader is in the checkpoint of a run.
    "hpctrain.data.loader": ["train/golden/stopped/synchronous"],
    "hpctrain.launch.site": ["launch/golden/site.toml"],
    "hpctrain.studies.point_records": ["studies/golden/environment.json"],
    "hpctrain.train.run_directory": ["train/golden/run-v1/env.json"],
}
"""Files of each version, from version 1, by the module that reads the format."""

OTHERS = {
    "hpctrain.checkpoint.export": "the metadata of a safetensors file that torch reads",
    "hpctrain.comm.node.peer_memory": "a file of the running job",
    "hpctrain.core.formats": "the function that all formats use",
    "hpctrain.data.format.part": "attributes of a shard, whose manifest has the version",
    "hpctrain.data.format.writer_files": "a journal; the next writer ignores other formats",
    "hpctrain.studies.study_run": "writes the format of point_records",
    "hpctrain.train.run_state": "the version of a generator of Python",
}
"""Other modules that write an entry ``format`` or ``version``, with the reason for no file."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def marks(tree: ast.AST) -> set[str]:
    """Return the calls and the keys of dictionaries that belong to a format with a version."""
    calls = {getattr(node.func, "id", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    keys = {
        getattr(key, "value", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
    }
    return calls & {"stamp", "fault_of"} | keys & {"format", "version"}


def test_each_format_has_golden_files_or_a_reason():
    found = {
        module_of(path): marks(ast.parse(path.read_text()))
        for path in (ROOT / "hpctrain").rglob("*.py")
    }
    readers = {module for module, each in found.items() if "fault_of" in each}
    assert readers == GOLDEN.keys()
    assert {module for module, each in found.items() if each} == readers | OTHERS.keys()


@pytest.mark.parametrize("module", GOLDEN)
def test_each_version_of_a_format_has_a_golden_file(module):
    paths = [ROOT / "tests" / each for each in GOLDEN[module]]
    assert [path for path in paths if not path.exists()] == []
    assert len(paths) == import_module(module).VERSION
