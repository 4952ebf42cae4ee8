import pytest

from hpctrain.comm.agreement import agreed
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.core.errors import ConfigError, MismatchError


@pytest.mark.ranks(1, 2, 3, 4)
def test_an_error_of_one_rank_is_raised_on_all_of_them(world):
    comm = MpiCommunicator(world)
    last = world.size - 1

    def check():
        with agreed(comm):
            if comm.rank == last:
                raise ConfigError("the file is missing")

    with pytest.raises(MismatchError) as caught:
        check()
    assert "the file is missing" in str(caught.value)
    assert (f"rank {last}" in str(caught.value)) == (world.size > 1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_what_all_ranks_met_is_said_without_the_ranks(world):
    with pytest.raises(MismatchError) as caught, agreed(MpiCommunicator(world)):
        raise ConfigError("the file is missing")
    assert str(caught.value) == "the file is missing"


@pytest.mark.ranks(1, 2, 3, 4)
def test_without_an_error_nothing_happens(world):
    with agreed(MpiCommunicator(world)):
        pass


def test_an_error_that_is_not_ours_keeps_its_class(world):
    with pytest.raises(ZeroDivisionError), agreed(MpiCommunicator(world)):
        raise ZeroDivisionError
