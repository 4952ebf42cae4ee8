"""Laws of the logger: tags, files, held and merged warnings."""

import logging
import subprocess
import sys

import pytest

from hpctrain.core import logs


def run_alone(code: str) -> str:
    """Run code in a process of its own: pytest's handlers would count as the program's."""
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


def test_each_line_carries_the_rank():
    code = "from hpctrain.core import logs; logs.setup(3, 4); logs.logger.warning('one\\ntwo')"
    assert run_alone(code) == "[rank 3] hpctrain: one\n[rank 3] two\n"


def test_a_world_of_one_has_no_tag():
    code = "from hpctrain.core import logs; logs.setup(0, 1); logs.logger.warning('slow disk')"
    assert run_alone(code) == "hpctrain: slow disk\n"


def test_a_second_setup_replaces_the_first():
    setups = "logs.setup(0, 2); logs.setup(1, 2)"
    code = f"from hpctrain.core import logs; {setups}; logs.logger.error('x')"
    assert run_alone(code) == "[rank 1] hpctrain: x\n"


@pytest.mark.parametrize(
    ("level", "printed"), [("debug", "d i w "), ("info", "i w "), ("warning", "w "), ("error", "")]
)
def test_what_is_printed_begins_at_a_level(level, printed):
    code = f"""
from hpctrain.core import logs
logs.setup(0, 1, level={level!r})
logs.logger.debug("d"), logs.logger.info("i"), logs.logger.warning("w")
"""
    assert run_alone(code).replace("hpctrain: ", "").replace("\n", " ") == printed


def test_handlers_of_the_program_win():
    code = """
import logging
from hpctrain.core import logs
logging.basicConfig(format="mine %(message)s")
logs.setup(1, 2)
logs.logger.warning("x")
"""
    assert run_alone(code) == "mine x\n"


def test_information_goes_to_the_file_of_the_rank_alone(tmp_path):
    code = f"""
from pathlib import Path
from hpctrain.core import logs
logs.setup(2, 4, Path({str(tmp_path / "log")!r}))
logs.logger.getChild("comm").info("plan made")
"""
    assert run_alone(code) == ""
    assert "INFO hpctrain.comm: plan made" in (tmp_path / "log/rank-2.log").read_text()


def test_merged_warnings_do_not_carry_the_tag_of_the_rank_that_prints_them():
    merged = "logs.warn_merged([['x'], ['x', 'y']])"
    code = f"from hpctrain.core import logs; logs.setup(0, 2); {merged}"
    assert run_alone(code) == "hpctrain: x [all 2 ranks]\nhpctrain: y [rank 1]\n"


def test_equal_warnings_merge_with_their_ranks_and_their_count():
    assert logs.merge([["a"], ["b", "a", "a"], [], ["a"], ["a"]]) == [
        "a [ranks 0-1,3-4, 4 of 5]",
        "b [rank 1]",
    ]


def test_a_world_of_one_merges_to_the_bare_text():
    assert logs.merge([["a", "b", "a"]]) == ["a", "b"]


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
