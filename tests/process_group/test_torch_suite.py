"""Torch's own tests run on our ranks, and a test that passes with gloo must pass."""

import pytest

from tests.conformance.launches import Outcome
from tests.conformance.torch_suite import EXCLUDED, WHEEL, Runs, compare, main

PASSED, FAILED, SKIPPED = Outcome("passed"), Outcome("failed", "why"), Outcome("skipped", "no")

pytestmark = pytest.mark.requires("expecttest")

SMOKE = "test_all_reduce_sum or test_send_recv_any_source or test_scatter_object_list"

FAKE = """
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiThreadedTestCase, skip_if_lt_x_gpu
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorTestBase,
    with_comms,
)


class OfTwo(DTensorTestBase):
    world_size = 2

    @with_comms
    def test_shards(self):
        whole = torch.arange(12).view(4, 3)
        parts = distribute_tensor(whole, self.build_device_mesh(), [Shard(0)])
        assert parts.to_local().shape == (2, 3)
        assert parts.full_tensor().equal(whole)

    @with_comms
    def test_is_gloo(self):
        assert dist.get_backend() == "gloo"

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_needs_cards(self):
        raise AssertionError

    @with_comms
    def test_fails_on_one_rank(self):
        assert self.rank == 0


class OfTwoThatStay(DTensorContinuousTestBase):
    world_size = 2

    def test_sums(self):
        out = torch.ones(3)
        dist.all_reduce(out)
        assert out.tolist() == [2, 2, 2]

    def test_knows_its_rank(self):
        assert self.rank == dist.get_rank() == int(os.environ["OMPI_COMM_WORLD_RANK"])


class OfFour(DTensorTestBase):
    def test_is_left_out(self):
        raise AssertionError


class OfThreads(MultiThreadedTestCase):
    def test_is_left_out(self):
        raise AssertionError
"""


@pytest.mark.conformance
@pytest.mark.launches
def test_a_selection_of_torchs_tests_passes(tmp_path):
    runs = Runs(tmp_path, SMOKE, 60)
    found = runs.run(WHEEL, "wheel", 2, "hpctrain")
    passed = {name.rpartition("::")[2] for name, each in found.items() if each.outcome == "passed"}
    assert passed >= set(SMOKE.split(" or "))


@pytest.mark.conformance
@pytest.mark.limit(300)
@pytest.mark.launches
def test_test_cases_of_torchs_harness_run_on_the_ranks(tmp_path):
    file = tmp_path / "test_fake.py"
    file.write_text(FAKE)
    runs = Runs(tmp_path / "logs", "", 60)
    runs.of(file, "fake", 2)
    assert runs.lines[0].split() == ["fake", "2", "4", "3"]
    (wrong,) = runs.wrong
    assert "OfTwo::test_is_gloo failed" in wrong
    assert "hpctrain" in wrong


def test_tests_that_pass_with_gloo_must_pass():
    (name,) = EXCLUDED
    gloo = {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": PASSED, f"X::{name}": PASSED}
    assert not list(compare(gloo, {"a": PASSED, "d": PASSED, f"X::{name}": FAILED}))
    wrong = list(compare(gloo, {"a": FAILED, "b": FAILED, f"X::{name}": PASSED}))
    assert [text.partition(":")[0] for text in wrong] == ["a failed", "d failed", "X"]
    assert "is excluded" in wrong[-1]


def test_a_folder_without_torchs_tests_is_an_error(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "has no file" in capsys.readouterr().err
