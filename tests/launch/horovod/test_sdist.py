"""Two lines are changed, those and no others, and only in the sources that are known."""

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.horovod.sdist import PATCHED, patch, standard_of

TOP = """project(horovod CXX)

set(CMAKE_CXX_STANDARD 14)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
string(PREPEND GLOO_CMAKE "set(CMAKE_CXX_STANDARD 17)\\n")
"""
TORCH = """if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
    set(CMAKE_CXX_STANDARD 14)
endif()
"""


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "horovod/torch").mkdir(parents=True)
    for name, text in zip(PATCHED, (TOP, TORCH), strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


def texts(sources):
    return [(sources / name).read_text() for name in PATCHED]


def test_exactly_two_lines_change(sources):
    changes = patch(sources, 20)
    assert list(map(str, changes)) == [
        f"{file}, line {line}: set(CMAKE_CXX_STANDARD 14) -> set(CMAKE_CXX_STANDARD 20)"
        for file, line in zip(PATCHED, (3, 2), strict=True)
    ]
    for before, after in zip((TOP, TORCH), texts(sources), strict=True):
        pairs = zip(before.splitlines(), after.splitlines(), strict=True)
        different = [(a, b) for a, b in pairs if a != b]
        assert [(a.strip(), b.strip()) for a, b in different] == [
            ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
        ]
        assert before.count("\n") == after.count("\n")


def test_a_second_time_changes_nothing(sources):
    patch(sources, 20)
    once = texts(sources)
    assert patch(sources, 20) == []
    assert texts(sources) == once


@pytest.mark.parametrize(
    "text",
    [
        TORCH.replace("14", "11"),
        TORCH + TORCH,
        "project(another)\n",
        TORCH.replace("set(", "set( "),
    ],
)
def test_unknown_sources_are_refused_and_stay_as_they_are(sources, text):
    (sources / PATCHED[1]).write_text(text)
    with pytest.raises(LaunchError, match=r"horovod/torch/CMakeLists.txt .* not the published"):
        patch(sources, 20)
    assert texts(sources) == [TOP, text]


def test_sources_without_a_file_are_refused(sources):
    (sources / PATCHED[1]).unlink()
    with pytest.raises(LaunchError, match="cannot be read"):
        patch(sources, 20)
    assert (sources / PATCHED[0]).read_text() == TOP


def test_the_standard_is_that_of_the_installed_torch(tmp_path):
    assert standard_of(tmp_path) == 20
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/cpp_extension.py").write_text("a = ['-std=c++17']\nb = '-std=c++23'\n")
    assert standard_of(tmp_path) == 23
