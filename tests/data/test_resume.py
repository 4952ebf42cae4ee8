"""Check that a writer resumes the work of an interrupted writer with equal settings, or restarts.

The interrupted writers are programs that fail; ``test_kills`` checks writers that are killed.
"""

import numpy as np
import pytest

from hpctrain.core.atomic import PART
from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import MANIFEST, Field, Manifest
from hpctrain.data.writer import ShardWriter, write_arrays
from tests.data.mixed_set import names_in
from tests.data.plain import read_whole

FIELDS = {"number": ((), "i8"), "text": Field.of((), "i4", ragged=True)}
SIZES = pytest.mark.ranks(1, 2, 3, 4)


def rows(start, stop):
    return {
        "number": np.arange(start, stop),
        "text": [np.full(n % 4, n, "i4") for n in range(start, stop)],
    }


class StopError(Exception):
    """End a program in the middle."""


def write(folder, start, stop, *, fail=False, key="numbers", fields=FIELDS, **options):
    """Write the remaining samples; return the number of samples that already existed."""
    options = {"samples_per_shard": 4, **options}
    with ShardWriter(folder, fields, resume_key=key, **options) as writer:
        kept = writer.num_written
        for first in range(start + kept, stop):
            writer.append({name: rows(first, first + 1)[name] for name in fields})
        assert writer.num_written == stop - start
        if fail:
            raise StopError("Stop")
    return kept


def stopped(folder, *arguments, **options):
    with pytest.raises(StopError):
        write(folder, *arguments, fail=True, **options)


def numbers_in(folder):
    read = read_whole(folder)
    numbers = [int(number) for number in read["number"]]
    for number, text in zip(numbers, read["text"], strict=True):
        assert np.array_equal(text, rows(number, number + 1)["text"][0])
    return numbers


@pytest.mark.parametrize(("done", "stop"), [(11, 18), (8, 8), (12, 13)])
def test_finished_shards_are_kept_and_the_result_is_the_same(tmp_path, done, stop):
    stopped(tmp_path, 0, done)
    assert write(tmp_path, 0, stop) == done // 4 * 4
    assert numbers_in(tmp_path) == list(range(stop))
    assert len(names_in(tmp_path)) == 1 + -(-stop // 4)


def test_the_old_set_is_there_until_the_new_one_is_whole(tmp_path):
    write(tmp_path, 100, 105, key="old")
    stopped(tmp_path, 0, 11)
    assert numbers_in(tmp_path) == list(range(100, 105))
    write(tmp_path, 0, 11)
    assert numbers_in(tmp_path) == list(range(11))


@pytest.mark.parametrize(
    "other",
    [
        {"key": "other"},
        {"fields": {"text": FIELDS["text"], "number": ((), "f8")}},
        {"samples_per_shard": 3},
        {"block_size": 3},
    ],
    ids=str,
)
def test_shards_with_other_settings_are_removed(tmp_path, other):
    stopped(tmp_path, 0, 11)
    assert write(tmp_path, 20, 25, **other) == 0
    assert numbers_in(tmp_path) == list(range(20, 25))
    assert not [name for name in names_in(tmp_path) if PART in name or "journal" in name]


def test_writer_without_a_key_removes_unfinished_shards(tmp_path):
    stopped(tmp_path, 0, 11)
    write_arrays(tmp_path, {"x": [1, 2]}, samples_per_shard=2)
    assert len(names_in(tmp_path)) == 2


def test_published_set_is_never_resumed(tmp_path):
    """As after a kill between the manifest and the removal of the journal."""
    stopped(tmp_path, 0, 8)
    journal = next(tmp_path.glob("*.journal"))
    text = journal.read_text()
    write(tmp_path, 0, 8)
    old = names_in(tmp_path)
    journal.write_text(text)
    stopped(tmp_path, 0, 3)
    assert {*old} < {*names_in(tmp_path)}
    assert numbers_in(tmp_path) == list(range(8))


def test_a_damaged_journal_is_ignored(tmp_path):
    stopped(tmp_path, 0, 8)
    next(tmp_path.glob("*.journal")).write_text('{"format": 1')
    assert write(tmp_path, 0, 9) == 0
    assert numbers_in(tmp_path) == list(range(9))


@pytest.mark.parametrize("what", ["missing", "cut"])
def test_only_shards_before_a_missing_one_are_kept(tmp_path, what):
    stopped(tmp_path, 0, 12)
    lost = sorted(tmp_path.glob(f"*{PART}"))[1]
    lost.write_bytes(lost.read_bytes()[:-1]) if what == "cut" else lost.unlink()
    assert write(tmp_path, 0, 12) == 4
    assert numbers_in(tmp_path) == list(range(12))
    assert len(names_in(tmp_path)) == 4


@SIZES
def test_each_rank_resumes_from_its_own_position(comm, folder):
    start, mine = 50 * comm.rank, 3 + 4 * comm.rank
    fails = comm.rank == comm.size - 1
    with pytest.raises(StopError if fails else DataError, match="Stop"):
        write(folder, start, start + mine, fail=fails, comm=comm)
    # Ranks that had completed have written a partial last shard as well.
    assert write(folder, start, start + 20, comm=comm) == (mine // 4 * 4 if fails else mine)
    comm.barrier()
    wanted = [50 * rank + number for rank in range(comm.size) for number in range(20)]
    assert numbers_in(folder) == wanted
    assert len(names_in(folder)) == 1 + len(Manifest.read(folder).shards)


@SIZES
@pytest.mark.parametrize("instant", ["before the manifest", "while files get their names"])
def test_a_publication_that_was_cut_short_is_gone_on_with(
    comm,
    folder,
    monkeypatch,
    instant,
):
    """The names, and the places inside the files, may have changed."""
    start = 50 * comm.rank
    with monkeypatch.context() as patch:
        if instant == "before the manifest":
            patch.setattr(Manifest, "write", refuse)
        elif comm.rank == comm.size - 1:
            patch.setattr("hpctrain.data.format.writer_files.sync", refuse)
        with pytest.raises(DataError, match="No space left"):
            write(folder, start, start + 6, comm=comm)
    comm.barrier()
    assert MANIFEST not in names_in(folder)
    assert [name for name in names_in(folder) if "-of-" in name]
    comm.barrier()
    assert write(folder, start, start + 9, comm=comm) == 6
    comm.barrier()
    wanted = [50 * rank + number for rank in range(comm.size) for number in range(9)]
    assert numbers_in(folder) == wanted
    assert len(names_in(folder)) == 1 + 3 * comm.size


def refuse(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2, 3)
def test_another_number_of_ranks_starts_from_zero(comm, folder):
    with pytest.raises((StopError, DataError)):
        write(folder, 50 * comm.rank, 50 * comm.rank + 9, fail=comm.rank == 0, comm=comm)
    if comm.rank == 0:
        assert write(folder, 0, 3) == 0
        assert numbers_in(folder) == [0, 1, 2]
        assert len(names_in(folder)) == 2
