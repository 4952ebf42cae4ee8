import pytest

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.train.step_meter import StepMeter


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_loss_is_the_mean_over_all_samples_of_all_ranks(world):
    tally = StepMeter()
    rows = [(rank, step, rank + step) for rank in range(world.size) for step in (1, 2)]
    for rank, step, num_samples in rows:
        if rank == world.rank:
            tally.add(
                loss=10.0 * rank + step, num_samples=num_samples, work_s=3.0, communication_s=1.0
            )
    interval = tally.take(MpiCommunicator(world))
    total = sum(num for _, _, num in rows)
    assert interval.num_samples == total
    assert interval.num_steps == 2
    assert interval.loss == pytest.approx(
        sum((10 * rank + step) * num for rank, step, num in rows) / total, rel=1e-14
    )
    assert (interval.compute_s, interval.communication_s) == pytest.approx((2.0, 1.0))
    assert interval.communication_share == pytest.approx(1 / 3)
    assert interval.samples_per_s == pytest.approx(total / 6.0)


def test_each_interval_begins_empty(world):
    tally = StepMeter()
    for loss in (1.0, 2.0):
        tally.add(loss=loss, num_samples=1, work_s=1.0, communication_s=0.0)
        assert tally.take(MpiCommunicator(world)).loss == loss


@pytest.mark.ranks(1, 2, 3)
def test_what_other_ranks_had_added_is_in_the_next_record(world):
    comm, tally, later = MpiCommunicator(world), StepMeter(), StepMeter()
    tally.add(loss=world.rank, num_samples=2, work_s=3.0, communication_s=1.0)
    later.load_shared(tally.shared(comm), world.rank)
    later.add(loss=4.0, num_samples=2, work_s=3.0, communication_s=1.0)
    interval = later.take(comm)
    assert (interval.num_steps, interval.num_samples) == (2, 4 * world.size)
    assert interval.loss == pytest.approx((4.0 + (world.size - 1) / 2) / 2)
    assert (interval.compute_s, interval.communication_s) == pytest.approx((2.0, 1.0))


def test_inputs_are_passed_on_and_their_wait_is_counted(world):
    tally = StepMeter()
    for batch in tally.inputs([1, 2, 3]):
        tally.add(loss=float(batch), num_samples=1, work_s=1.0, communication_s=0.0)
    interval = tally.take(MpiCommunicator(world))
    assert interval.loss == 2.0
    assert 0 < interval.input_s < 1
