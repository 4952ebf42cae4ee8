"""Look-up and step of rows of a sharded embedding, against mpi4py, DDP and torchrec.

    hpctrain launch -n 2 -- python perf/bench_embedding.py [--json FILE] [--large]

Each rank gathers ``ROWS`` distinct rows of ``DIM`` float32 numbers from a table of ``TABLE`` rows,
in random order, about half of the rows from other ranks, and returns as many gradients.

* ``copy``: one copy of as many bytes into mapped memory, a lower bound;
* ``passes``: the memory accesses of rows in random order, without communication: a look-up gathers
  rows; a step copies gradients, gathers them, gathers rows, subtracts, and stores rows;
* ``by hand``: a program with mpi4py and numpy: ids sorted by owner, ``Alltoallv`` of ids, of rows
  and of gradients; sums on the owner by ``numpy.unique`` and ``index_add_``, and plain descent;
* ``DDP``: a sparse ``nn.Embedding`` on every rank, whose gradients gloo gathers;
* ``torchrec``: row-wise shards over gloo, if it is installed.

The methods are interleaved; ratios are the time of a peer over that of hpctrain. With ``--large``
the program instead measures steps of 1000 rows in tables of 10^6 and 10^8 rows of 16 numbers, also
interleaved: of rows that are used for the first time, for which the system allocates pages, and of
rows that were updated before.
"""

import sys

import numpy as np
import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI
from peers import start_gloo, stop_gloo
from table import spread
from torch import nn

import hpctrain as hvd
from hpctrain.async_sgd.sharded_embedding_rows import CHUNK_BYTES, put, take

TABLE, ROWS, DIM, LR = 1_000_000, 100_000, 64, 0.1
LARGE_DIM, LARGE_ROWS, FEW, BATCHES = 16, 100_000_000, 1000, 8
COMM = MPI.COMM_WORLD


class ByHand:
    """A table divided into ranges of rows, with collectives of MPI."""

    def __init__(self) -> None:
        self.per_rank = -(-TABLE // COMM.size)
        self.rows = torch.rand(self.per_rank, DIM).numpy()

    def pull(self, ids):
        """Return the rows with these ids, from all ranks."""
        owners = ids // self.per_rank
        self.order = np.argsort(owners, kind="stable")
        self.sent = np.bincount(owners, minlength=COMM.size)
        self.heard = np.empty_like(self.sent)
        COMM.Alltoall(self.sent, self.heard)
        self.asked = np.empty(self.heard.sum(), np.int64)
        COMM.Alltoallv([ids[self.order], self.sent], [self.asked, self.heard])
        self.asked -= COMM.rank * self.per_rank
        came, found = (np.empty((len(ids), DIM), np.float32) for _ in range(2))
        COMM.Alltoallv([self.rows[self.asked], self.heard * DIM], [came, self.sent * DIM])
        found[self.order] = came
        return found

    def push(self, grads):
        """Subtract the sum of the gradients of each row, after a ``pull`` of the same ids."""
        came = np.empty((len(self.asked), DIM), np.float32)
        COMM.Alltoallv([grads[self.order], self.sent * DIM], [came, self.heard * DIM])
        rows, index = np.unique(self.asked, return_inverse=True)
        sums = torch.zeros(len(rows), DIM)
        sums.index_add_(0, torch.from_numpy(index), torch.from_numpy(came))
        self.rows[rows] -= (LR / COMM.size) * sums.numpy()


def of_ours(table, ids, grads):
    """Return pull and push of hpctrain."""
    found = []

    def pull():
        found[:] = [table(ids)]

    def push():
        found[0].backward(grads)
        table.step()

    return pull, push


def of_hand(by_hand, ids, grads):
    """Return pull and push of the program with mpi4py."""
    return lambda: by_hand.pull(ids), lambda: by_hand.push(grads.numpy())


def of_passes(grads):
    """Return the passes over memory of pull and push, in chunks that stay in the cache."""
    random, chunk = np.random.default_rng(COMM.rank), CHUNK_BYTES // (4 * DIM)
    rows, left, found = torch.rand(TABLE // COMM.size, DIM), torch.rand(ROWS, DIM), grads.clone()
    places = np.sort(random.choice(len(rows), ROWS, replace=False))
    order = random.permutation(ROWS)

    def pull():
        torch.index_select(rows, 0, torch.from_numpy(places), out=found)

    def push():
        left.copy_(grads)
        for at in range(0, ROWS, chunk):
            here = places[at : at + chunk]
            values = take(rows, here).sub_(take(left, order[at : at + chunk]), alpha=LR)
            put(rows, here, values)

    return pull, push


def of_ddp(ids, grads):
    """Return pull and push of a replicated table, whose sparse gradients DDP gathers."""
    table = nn.Embedding(TABLE, DIM, sparse=True)
    model = nn.parallel.DistributedDataParallel(table)
    optimizer = torch.optim.SGD(table.parameters(), lr=LR)
    found = []

    def pull():
        found[:] = [model(ids)]

    def push():
        found[0].backward(grads)
        optimizer.step()
        optimizer.zero_grad()

    return pull, push


def of_torchrec(ids, grads):
    """Return pull and push of torchrec's row-wise shards; None where it is not installed."""
    try:
        model = _row_wise()
    except (ImportError, OSError) as error:
        return str(error).splitlines()[0]
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415 - only where it is there

    lengths = torch.ones(len(ids), dtype=torch.int64)
    features = KeyedJaggedTensor.from_lengths_sync(["ids"], ids, lengths)
    found = []

    def pull():
        found[:] = [model(features)["ids"].values()]

    def push():
        found[0].backward(grads)

    return pull, push


def _row_wise():
    """Return the table of torchrec, sharded by rows."""
    import fbgemm_gpu  # noqa: F401, PLC0415 - only where it is there
    import torch.distributed as dist  # noqa: PLC0415
    from torchrec import EmbeddingCollection, EmbeddingConfig  # noqa: PLC0415
    from torchrec.distributed import DistributedModelParallel, planner  # noqa: PLC0415
    from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: PLC0415
    from torchrec.distributed.types import ShardingEnv  # noqa: PLC0415
    from torchrec.optim.apply_optimizer_in_backward import (  # noqa: PLC0415
        apply_optimizer_in_backward,
    )

    config = EmbeddingConfig(
        name="table", embedding_dim=DIM, num_embeddings=TABLE, feature_names=["ids"]
    )
    tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": LR})
    sharder, rows = EmbeddingCollectionSharder(), ["row_wise"]
    planning = planner.EmbeddingShardingPlanner(
        topology=planner.Topology(world_size=COMM.size, compute_device="cpu"),
        constraints={"table": planner.ParameterConstraints(sharding_types=rows)},
    )
    return DistributedModelParallel(
        tables,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=planning.collective_plan(tables, [sharder], dist.group.WORLD),
        sharders=[sharder],
    )


def measure(rounds: int, json_file) -> None:
    """Time look-up and step of all methods."""
    random = np.random.default_rng(COMM.rank)
    ids = random.choice(TABLE, ROWS, replace=False)
    tensor, grads = torch.from_numpy(ids), torch.rand(ROWS, DIM)
    table = hvd.ShardedEmbedding(TABLE, DIM, optimizer="sgd", lr=LR)
    by_hand = ByHand()
    check(table, by_hand, ids)
    methods = {"ours": of_ours(table, tensor, grads), "by hand": of_hand(by_hand, ids, grads)}
    target, source = torch.empty(ROWS, DIM), torch.rand(ROWS, DIM)
    methods["copy"] = (lambda: target.copy_(source),) * 2
    methods["passes"] = of_passes(grads)
    for name, make in {"DDP": of_ddp, "torchrec": of_torchrec}.items():
        made = make(tensor, grads)
        if isinstance(made, str):
            sys.stderr.write(f"{name} is skipped: {made}\n" * (COMM.rank == 0))
        else:
            methods[name] = made
    pulls = {name: pull for name, (pull, _) in methods.items()}
    pushes = {name: push for name, (_, push) in methods.items()}
    looked_up = interleave(pulls, rounds=rounds, repetitions=3)

    stepped: dict[str, list[float]] = {name: [] for name in pushes}
    for _ in range(rounds):
        for name, push in pushes.items():
            how = {"rounds": 1, "repetitions": 3, "prepare": pulls[name]}
            stepped[name] += interleave({name: push}, **how)[name]
    rows, ratios, spreads = [], {}, {}
    for what, seconds in (("look up", looked_up), ("step", stepped)):
        middle = {name: median(times) for name, times in seconds.items()}
        rows.append({"what": what, **{f"{name} ms": s * 1e3 for name, s in middle.items()}})
        for name in [*middle][1:]:
            ratios[f"{name} / ours, {what}"] = middle[name] / middle["ours"]
            spreads[f"{name} / ours, {what}"] = spread(seconds[name], seconds["ours"], rounds)
    title = f"{ROWS} rows of {DIM} float32, {COMM.size} ranks on one node"
    report(title, rows, ratios, json_file, spreads)


def check(table, by_hand, ids) -> None:
    """Exit if hpctrain and the program with mpi4py change rows differently in a step."""
    grads = np.random.default_rng(COMM.rank).random((ROWS, DIM), np.float32)
    before = table(torch.from_numpy(ids)), torch.from_numpy(by_hand.pull(ids))
    table.zero_grad()
    table(torch.from_numpy(ids)).backward(torch.from_numpy(grads))
    table.step()
    by_hand.push(grads)
    after = table(torch.from_numpy(ids)), torch.from_numpy(by_hand.pull(ids))
    moved, exact = (
        late.detach() - early.detach() for early, late in zip(before, after, strict=True)
    )
    hvd.current().comm.agree(bool((moved - exact).abs().max() < 1e-5), "the steps differ")


def measure_large(rounds: int, json_file) -> None:
    """Time steps in tables of several sizes, on rows of all parts, and report the memory."""
    sizes = [1_000_000, LARGE_ROWS]
    tables = {n: hvd.ShardedEmbedding(n, LARGE_DIM, optimizer="adagrad") for n in sizes}
    grads = torch.rand(FEW, LARGE_DIM)
    batches = {
        n: [
            torch.from_numpy(np.random.default_rng(COMM.rank + 9 * i).integers(0, n, FEW))
            for i in range(BATCHES)
        ]
        for n in sizes
    }

    def step(num_rows: int):
        numbers = iter(range(1 << 60))

        def work() -> None:
            tables[num_rows](batches[num_rows][next(numbers) % BATCHES]).backward(grads)
            tables[num_rows].step()

        return work

    works = {f"{n}": step(n) for n in sizes}
    first = interleave(works, rounds=BATCHES, warm_up=0)  # each batch once
    again = interleave(works, rounds=rounds, repetitions=64, warm_up=2 * BATCHES)
    rows = [
        {"rows": name, "first step ms": median(first[name]) * 1e3, "step ms": median(s) * 1e3}
        for name, s in again.items()
    ]
    small, large = works
    ratios, spreads = {}, {}
    for what, seconds, turns in (("first step", first, BATCHES), ("step", again, rounds)):
        name = f"{large} rows / {small} rows, {what}"
        ratios[name] = median(seconds[large]) / median(seconds[small])
        spreads[name] = spread(seconds[large], seconds[small], turns)
    resident = COMM.gather(_resident_mib())
    sys.stderr.write(f"resident MiB of each rank: {resident}\n" * (COMM.rank == 0))
    title = f"steps of {FEW} rows of {LARGE_DIM} float32 and Adagrad's state, {COMM.size} ranks"
    report(title, rows, ratios, json_file, spreads)


def _resident_mib() -> int:
    text = open("/proc/self/status").read()  # noqa: SIM115, PTH123 - of this process
    return int(text.split("VmRSS:")[1].split()[0]) // 1024


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="tables of up to 10^8 rows")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    if options.large:
        measure_large(options.rounds, options.json)
        return
    start_gloo()
    measure(options.rounds, options.json)
    stop_gloo()


if __name__ == "__main__":
    main()
