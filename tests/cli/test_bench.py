"""Check ``hpctrain bench``: every operation, wrong values, and unsupported requests."""

import contextlib
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli.main import app
from hpctrain.comm.ops import Op, combination
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CommError, ConfigError
from hpctrain.core.units import MIB
from hpctrain.cost.fitting import read_points
from hpctrain.cost.schedules import SCHEDULES
from hpctrain.doctor.benchmarks import benchmark
from hpctrain.doctor.benchmarks.benchmark import UNCHECKABLE, BenchmarkRequest, measure
from hpctrain.doctor.benchmarks.operations import (
    OPERATIONS,
    PERIOD,
    combined,
    num_wrong,
    values_of,
    write,
)
from hpctrain.launch import mpiexec
from hpctrain.runtime.world import current
from hpctrain.train.console import make_console
from tests.harness import preload
from tests.processes import ended

SIZES = pytest.mark.ranks(1, 2, 3, 4)
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def measured(comm, num_bytes, operation="allreduce", **options):
    """Return the row of one size, with the fewest possible calls."""
    request = BenchmarkRequest(operation=operation, **{"iterations": 2} | options)
    return measure(comm, request, request.setup(num_bytes))


@pytest.fixture
def comm():
    hpctrain.init(ranks_per_node=2)
    yield current().comm
    hpctrain.shutdown()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_the_sum_is_exact_in_every_dtype_that_has_one(size):
    for dtype in set(DTYPES) - set(UNCHECKABLE):
        with contextlib.suppress(CommError):
            combine = combination(dtype, Op.SUM)
            total = values_of(0, size, dtype).view(combine.storage_dtype)
            for rank in range(1, size):
                combine.into(total, values_of(rank, size, dtype).view(combine.storage_dtype))
            assert num_wrong(total.view(dtype), combined(size, dtype)) == 0, dtype


@pytest.mark.parametrize("numel", [0, 1, PERIOD, 1000, 1_200_000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128])
def test_each_wrong_element_is_counted_once(numel, dtype):
    period = values_of(1, 3, dtype)
    values = torch.empty(numel, dtype=dtype)
    write(values, period, start=5)
    assert num_wrong(values, period, start=5) == 0
    for place in {0, numel // 2, numel - 1} if numel else ():
        values[place] = not values[place]
    assert num_wrong(values, period, start=5) == len({0, numel // 2, numel - 1} if numel else ())


@SIZES
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_measured_and_right(comm, name):
    if name == "send" and comm.size == 1:
        return
    for num_bytes in (1, 100, 100_000):
        row = measured(comm, num_bytes, name)
        assert row.num_wrong == 0
        assert row.num_bytes == 4 * row.numel
        assert 0 < row.min_us <= row.avg_us <= row.max_us
        assert row.bus_gbs == pytest.approx(
            row.algorithm_gbs * OPERATIONS[name].bus_factor(comm.size)
        )


@SIZES
def test_allreduce_takes_buckets(comm):
    assert measured(comm, 10_000, dtype="int32", in_bucket=True).num_wrong == 0


@pytest.mark.ranks(2, 3)
def test_the_library_is_measured_on_the_same_memory(comm):
    row = measured(comm, 10_000, iterations=5, peers=True)
    assert row.library_us is not None
    assert row.library_ratio == pytest.approx(row.library_us / row.avg_us)
    assert len(benchmark.line(row)) == len(benchmark.head(peers=True))


@pytest.mark.ranks(2, 4)
def test_measurements_are_written_as_points_that_a_fit_reads(comm, tmp_path):
    file = tmp_path / "points.json"
    request = BenchmarkRequest(
        operation="allreduce", in_bucket=True, min_bytes=65536, max_bytes=MIB, iterations=2
    )
    assert benchmark.run(request, make_console, file)
    if comm.rank == 0:
        points = read_points(file)
        assert [point.num_bytes for point in points] == [65536, 262144, MIB]
        assert {(p.nodes, p.ranks_per_node) for p in points} == {(comm.size // 2, 2)}
        assert all(point.rails == (comm.num_rails or 1) for point in points)
        known = {"slices"} if comm.size == 2 else set(SCHEDULES)
        assert {point.algorithm for point in points} <= known
    wrong = BenchmarkRequest(operation="allreduce", dtype="float64")
    with pytest.raises(ConfigError, match="got allreduce of float64"):
        benchmark.run(wrong, make_console, file)
    with pytest.raises(ConfigError, match=r"an existing folder, but .*nowhere"):
        benchmark.run(request, make_console, tmp_path / "nowhere/points.json")


@pytest.mark.ranks(3)
def test_a_wrong_value_on_one_rank_is_counted_on_all(comm, monkeypatch):
    real = OPERATIONS["allreduce"]

    def wrong(comm, setup):
        case = real.case(comm, setup)

        def call():
            case.call()
            case.given[0].values[comm.rank :: 100] += comm.rank == 1

        return replace(case, call=call)

    monkeypatch.setitem(OPERATIONS, "allreduce", real._replace(case=wrong))
    assert measured(comm, 4000).num_wrong == 10


@pytest.mark.parametrize(
    ("size", "factors"), [(1, (0, 0, 0, 0)), (2, (1, 0.5, 0.5, 1)), (4, (1.5, 0.75, 0.75, 1))]
)
def test_bus_factors_are_those_of_nccl_tests(size, factors):
    names = ("allreduce", "all_gather", "reduce_scatter", "broadcast")
    assert tuple(OPERATIONS[name].bus_factor(size) for name in names) == factors


def test_sizes_grow_and_end_at_the_last_one():
    request = BenchmarkRequest(operation="allreduce", min_bytes=8, max_bytes=100)
    assert [setup.num_bytes for setup in request.setups()] == [8, 32, 100]
    assert [setup.num_bytes for setup in BenchmarkRequest(operation="barrier").setups()] == [0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"operation": "allreduc"}, "one of allreduce, reduce_scatter"),
        ({"min_bytes": 100, "max_bytes": 10}, "--min-bytes 100"),
        ({"dtype": "float33"}, "'float33'"),
        ({"dtype": "float8_e8m0fnu"}, "'float8_e8m0fnu'"),
        ({"operation": "broadcast", "in_bucket": True}, "operation of --bucket must be allreduce"),
        ({"operation": "send", "peers": True}, "operation of --peers must be allreduce"),
    ],
)
def test_invalid_requests_are_rejected_before_the_start(options, text):
    with pytest.raises(ConfigError) as caught:
        BenchmarkRequest(**{"operation": "allreduce"} | options)
    assert text in str(caught.value)


def test_one_rank_is_measured_and_says_so():
    words = ["bench", "allreduce", "--max-bytes", "1KiB", "--iterations", "2"]
    result = CliRunner().invoke(app, words)
    hpctrain.shutdown()
    assert result.exit_code == 0
    assert "one rank: no data are sent" in result.output
    rows = [line.split()[0] for line in result.output.splitlines() if line[:1] == " "]
    assert rows == ["bytes", "8", "32", "128", "512", "1024"]


def test_send_needs_two_ranks():
    result = CliRunner().invoke(app, ["bench", "send"])
    hpctrain.shutdown()
    assert "hpctrain launch -n 2 hpctrain bench send" in str(result.exception)


def test_a_wrong_value_is_exit_code_1(monkeypatch):
    real = SerialCommunicator.allreduce_

    def wrong(self, tensor, **options):
        work = real(self, tensor, **options)
        tensor[:2] += 1  # 8 bytes of float32 are summed
        return work

    monkeypatch.setattr(SerialCommunicator, "allreduce_", wrong)
    result = CliRunner().invoke(app, ["bench", "allreduce", "--max-bytes", "8"])
    hpctrain.shutdown()
    assert result.exit_code == 1
    assert "2 wrong values" in result.output


@pytest.mark.launches
def test_rank_0_prints_machine_plan_and_a_line_per_size():
    line = [*preload.python(), "-m", "hpctrain", "bench", "allreduce", "--peers"]
    line += ["--max-bytes", "128", "--iterations", "5"]
    done = ended(mpiexec.command(line, num_ranks=2), env=mpiexec.environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("# ranks ") for line in lines) == 1
    assert any(line.startswith("# gradient path ") for line in lines)
    assert [line.split()[0] for line in lines if line[:1] == " "] == ["bytes", "8", "32", "128"]
