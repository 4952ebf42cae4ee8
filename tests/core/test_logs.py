"""Check the logger: tags, files, held and merged warnings."""

import logging
import subprocess
import sys

import pytest

from hpctrain.core import logs


def run_alone(code: str) -> str:
    """Run code in a separate process: handlers of pytest would count as the program's."""
    code = f"from hpctrain.core import logs; RANGE = range(1, 5); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stderr


@pytest.fixture
def quiet_logger():
    handlers, level = list(logs.logger.handlers), logs.logger.level
    yield logs.logger
    for handler in logs.logger.handlers:
        if handler not in handlers:
            handler.close()
    logs.logger.handlers, logs.logger.level = handlers, level


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("logs.setup(3, 4); logs.logger.warning('1\\n2')", "[rank 3] hpctrain: 1\n[rank 3] 2\n"),
        ("logs.setup(0, 1); logs.logger.warning('slow disk')", "hpctrain: slow disk\n"),
        ("logs.setup(0, 2); logs.setup(1, 2); logs.logger.error('x')", "[rank 1] hpctrain: x\n"),
        (
            "logs.setup(0, 2); logs.warn_merged([['x'], ['x', 'y']])",
            "hpctrain: x [all 2 ranks]\nhpctrain: y [rank 1]\n",
        ),
        (
            "logs.logging.basicConfig(format='%(msg)s'); logs.setup(1, 2); logs.logger.error(7)",
            "7\n",
        ),
        *(
            (
                f"logs.setup(0, 1, level={level!r}); [logs.logger.log(10 * n, n) for n in RANGE]",
                "".join(f"hpctrain: {n}\n" for n in printed),
            )
            for level, printed in {"debug": "1234", "info": "234", "error": "4"}.items()
        ),
    ],
)
def test_lines_carry_the_rank_from_a_level_on_unless_the_program_has_handlers(code, printed):
    assert run_alone(code) == printed


@pytest.mark.parametrize(("per_rank", "num_files"), [("0", 1), ("1", 3)])
def test_information_goes_to_a_file_that_its_first_line_creates(
    per_rank, num_files, tmp_path, monkeypatch
):
    monkeypatch.setenv("HPCTRAIN_LOG_PER_RANK", per_rank)
    folder = tmp_path / "log"
    setup = f"logs.setup(%d, 4, __import__('pathlib').Path({str(folder)!r}))"
    assert run_alone(setup % 0) == ""
    assert not folder.exists()
    for rank in (2, 1, 3):
        log = f"logs.logger.getChild('comm').info('plan {rank}\\nmade')"
        assert run_alone(f"{setup % rank}; {log}") == ""
    assert len(list(folder.iterdir())) == num_files
    lines = logs.file_in(folder, 1).read_text().splitlines()
    assert len(lines) == 6 // num_files
    assert "INFO hpctrain.comm: plan 1" in lines[-2 if per_rank == "1" else 2]
    assert all(line.startswith("[rank ") for line in lines)
    assert "[rank 1] made" in lines


def test_equal_warnings_merge_with_their_ranks_and_their_count():
    assert logs.merge([["a"], ["b", "a", "a"], [], ["a"], ["a"]]) == [
        "a [ranks 0-1,3-4, 4 of 5]",
        "b [rank 1]",
    ]
    assert logs.merge([["a", "b", "a"]]) == ["a", "b"]
    many = logs.merge([["all", f"of rank {rank}"] for rank in range(10_000)])
    assert len(many) == logs.MAX_TEXTS + 1
    assert many[0] == "all [all 10000 ranks]"
    assert many[-1] == "9985 other warnings, which are not shown [ranks 15-9999, 9985 of 10000]"


def test_held_warnings_are_not_logged(quiet_logger, caplog):
    with logs.held() as messages:
        quiet_logger.getChild("comm").warning("cores are shared: %s", "0x3")
        quiet_logger.error("at once")
    assert messages == ["cores are shared: 0x3"]
    assert [record.message for record in caplog.records] == ["at once"]
    quiet_logger.warning("later")
    assert caplog.records[-1].message == "later"


def test_held_warnings_are_logged_after_an_error(quiet_logger, caplog):
    def fail_after_warning():
        with logs.held():
            quiet_logger.warning("no shared memory")
            raise OSError("mmap failed")

    with pytest.raises(OSError, match="mmap failed"):
        fail_after_warning()
    assert [record.message for record in caplog.records] == ["no shared memory"]
    assert caplog.records[0].levelno == logging.WARNING
