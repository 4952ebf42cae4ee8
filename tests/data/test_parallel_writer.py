"""Check that ranks concurrently write one data set in the order of ranks, or no data set."""

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import Field, Manifest
from hpctrain.data.writer import ShardWriter, write_arrays
from tests.data.mixed_set import names_in, numbers_in
from tests.data.plain import read_whole
from tests.full_disk import largest_file

FIELDS = {"number": ((), "i8"), "text": Field.of((2,), "u1", ragged=True)}
SIZES = pytest.mark.ranks(1, 2, 3, 4)


def samples(start, stop):
    numbers = np.arange(start, stop)
    return {"number": numbers, "text": [np.full((n % 3, 2), n % 251, "u1") for n in numbers]}


def write(folder, comm, counts, **options):
    """Write ``counts`` samples from each rank, numbered in the order of the ranks."""
    start = sum(counts[: comm.rank])
    with ShardWriter(folder, FIELDS, samples_per_shard=4, comm=comm, **options) as writer:
        for first in range(start, start + counts[comm.rank], 3):
            stop = min(first + 3, start + counts[comm.rank])
            writer.append(samples(first, stop))
    return writer.manifest


COUNTS = {
    "even": lambda _: 9,
    "uneven": lambda rank: 3 + 5 * rank,
    "first rank has none": lambda rank: 7 * (rank > 0),
    "last rank alone": lambda rank: 6 * (rank == 3),
}


@SIZES
@pytest.mark.parametrize("of_rank", COUNTS.values(), ids=COUNTS)
def test_a_set_holds_the_samples_in_the_order_of_the_ranks(comm, folder, of_rank):
    counts = [of_rank(rank) for rank in range(comm.size)]
    counts[-1] = counts[-1] or 6
    manifest = write(folder, comm, counts)
    assert manifest == Manifest.read(folder)
    assert len(manifest.shards) == sum(-(-count // 4) for count in counts)
    comm.barrier()
    if comm.rank == 0:
        read, wanted = read_whole(folder), samples(0, sum(counts))
        assert np.array_equal(read["number"], wanted["number"])
        assert all(map(np.array_equal, read["text"], wanted["text"]))
        assert len(names_in(folder)) == len(manifest.shards) + 1


@SIZES
def test_no_samples_on_any_rank_is_an_error_on_all(comm, folder):
    with pytest.raises(DataError, match="at least one sample"):
        write(folder, comm, [0] * comm.size)
    comm.barrier()
    assert not names_in(folder)


@pytest.fixture
def old(comm, folder):
    """Write a data set in ``folder`` before the test; return its file names."""
    if comm.rank == 0:
        write_arrays(folder, {"number": np.arange(5)}, samples_per_shard=3)
    comm.barrier()
    return names_in(folder)


def check_old(comm, folder, old):
    comm.barrier()
    assert names_in(folder) == old
    assert numbers_in(folder) == [0, 1, 2, 3, 4]


@SIZES
def test_an_error_on_one_rank_is_one_on_all_and_the_old_set_stays(comm, folder, old):
    last = comm.size - 1

    def fail_half_way():
        with ShardWriter(folder, FIELDS, samples_per_shard=4, comm=comm) as writer:
            writer.append(samples(0, 11))
            if comm.rank == last:
                raise KeyError("program of one rank")

    error = KeyError if comm.rank == last else DataError
    with pytest.raises(error, match="program of one rank"):
        fail_half_way()
    check_old(comm, folder, old)


@SIZES
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_old_set_stays(comm, folder, old):
    full = 2000 if comm.rank == comm.size - 1 else 10**9
    with largest_file(full), pytest.raises(DataError, match="File too large"):
        write(folder, comm, [9] * comm.size)
    check_old(comm, folder, old)


@SIZES
@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyError("No space left")])
def test_a_manifest_that_cannot_be_written_is_an_error_on_all(
    comm, folder, old, monkeypatch, error
):
    def refuse(*_):
        raise error

    monkeypatch.setattr(Manifest, "write", refuse)
    is_ours = isinstance(error, OSError) or comm.rank > 0
    with pytest.raises(DataError if is_ours else KeyError, match="No space left"):
        write(folder, comm, [9] * comm.size)
    check_old(comm, folder, old)


@SIZES
@pytest.mark.usefixtures("old")
def test_a_set_with_its_manifest_in_place_stays_intact(comm, folder, monkeypatch):
    def write_and_fail(self, directory, write_it=Manifest.write):
        write_it(self, directory)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Manifest, "write", write_and_fail)
    with pytest.raises(DataError, match="Input/output error"):
        write(folder, comm, [3] * comm.size)
    comm.barrier()
    assert numbers_in(folder) == list(range(3 * comm.size))


@SIZES
def test_a_directory_that_cannot_be_made_is_an_error_on_all(comm, folder):
    if comm.rank == 0:
        folder.touch()
    comm.barrier()
    with pytest.raises(DataError, match="choose another directory"):
        write(folder, comm, [9] * comm.size)


@SIZES
def test_a_new_set_replaces_the_old_one(comm, folder, old):
    write(folder, comm, [9] * comm.size)
    comm.barrier()
    assert not {*old} & {*names_in(folder)} - {"manifest.json"}
    assert numbers_in(folder) == list(range(9 * comm.size))


@pytest.mark.ranks(2, 3)
def test_different_arguments_are_reported_on_every_rank(comm, folder):
    with pytest.raises(DataError, match=r"same arguments.*'x1'.*|same arguments"):
        ShardWriter(folder, {f"x{comm.rank}": ((), "i8")}, samples_per_shard=1, comm=comm)
    with pytest.raises(DataError, match="samples_per_shard must be at least 1, got 0"):
        ShardWriter(folder, FIELDS, samples_per_shard=comm.rank, comm=comm)


@pytest.mark.ranks(2, 3)
def test_a_directory_that_is_not_shared_is_reported(comm, tmp_path):
    """Every rank has a separate directory, as on nodes without a common file system."""
    mine = tmp_path / str(comm.rank)
    mine.mkdir()
    with pytest.raises(DataError, match=r"rank 0 does not see .*; choose a directory"):
        write(mine, comm, [3] * comm.size)
    assert not names_in(mine)
    with pytest.raises(DataError, match="this rank does not see"):
        write(tmp_path / f"missing-{comm.rank}", comm, [3] * comm.size)
