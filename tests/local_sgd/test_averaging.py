"""Averages over replicas: in buckets, of states that only some ranks have, and with late ranks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.compress.codec import Identity
from hpctrain.compress.half import HalfCodec
from hpctrain.core.errors import MismatchError
from hpctrain.local_sgd.averaged_tensors import Tensors
from hpctrain.local_sgd.averaging import AnchoredAveraging, Averaging, NodeVector
from hpctrain.runtime.world import current
from tests.gradients.training import global_batch, make_model, part_of, sgd
from tests.local_sgd.local_methods import METHODS, Normed, Run, adam, replica_of, train, weights_of

EVERY_SIZE = pytest.mark.ranks(1, 2, 3, 4)


def tensors(rank: int) -> list[tuple[str, torch.Tensor]]:
    """Return random tensors of several dtypes and layouts, different on every rank."""
    numbers = torch.Generator().manual_seed(rank)
    images = torch.randn(2, 3, 4, 5, generator=numbers)
    return [
        ("matrix", torch.randn(70, 30, generator=numbers, dtype=torch.float64)),
        ("columns", torch.randn(30, 7, generator=numbers).t()),
        ("scalar", torch.randn((), generator=numbers)),
        ("empty", torch.empty(0)),
        ("images", images.to(memory_format=torch.channels_last)),
    ]


def node_comm():
    here = current()
    groups = [here.comm.group(ranks) for ranks in here.topology.nodes]
    return groups[here.topology.node]


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 25])
@pytest.mark.parametrize("anchored", [False, True])
def test_every_tensor_is_set_to_the_weighted_mean(world, bucket_bytes, anchored):
    mine = tensors(world.rank)
    weights = [0.0 if rank == 1 else rank + 0.5 for rank in range(world.size)]
    expected = [
        sum(w * tensors(r)[i][1].double() for r, w in enumerate(weights)) / sum(weights)
        for i in range(len(mine))
    ]
    options = (current().comm, Identity(), Tensors(lambda: mine), bucket_bytes)
    averaging = AnchoredAveraging(*options, node=node_comm()) if anchored else Averaging(*options)
    assert not averaging.is_in_flight
    before = [tensor.clone() for _, tensor in mine]
    averaging.start(weights[world.rank], 1 / sum(weights))
    assert averaging.is_in_flight
    squared = averaging.finish()
    for (_, tensor), mean in zip(mine, expected, strict=True):
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)
    distance = sum(float((b - m).square().sum()) for b, m in zip(before, expected, strict=True))
    assert squared == pytest.approx(distance, rel=1e-4, abs=1e-9)
    bits = b"".join(t.contiguous().numpy().tobytes() for _, t in mine)
    assert len(set(world.allgather(bits))) == 1


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
def test_keep_mixes_the_local_values_and_own_state_restores_an_averaging_in_flight(world):
    own = torch.full((100,), float(world.rank))
    averaging = Averaging(current().comm, Identity(), Tensors(lambda: [("own", own)]), 1 << 20)
    averaging.start(1.0, 1.0 / world.size)
    travelled = averaging.own_state()
    own.fill_(10.0)
    averaging.finish(keep=0.25)
    mean = (world.size - 1) / 2
    torch.testing.assert_close(own, torch.full((100,), 2.5 + 0.75 * mean))
    assert averaging.own_state() is None
    own.fill_(20.0)
    averaging.load_own_state(travelled)
    averaging.finish()
    torch.testing.assert_close(own, torch.full((100,), mean))


class Held(Tensors):
    def held(self):
        return {"held"}


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
def test_held_tensors_become_the_mean_of_an_averaging_that_a_state_restores(world):
    own = {name: torch.full((100,), float(world.rank)) for name in ("held", "trained")}
    make = lambda: Averaging(current().comm, Identity(), Held(lambda: [*own.items()]), 1 << 20)  # noqa: E731
    before, after = make(), make()
    before.start(1.0, 1.0 / world.size)
    after.load_own_state(before.own_state())
    after.finish(keep=0.5)
    mean = (world.size - 1) / 2
    assert own["held"].unique().tolist() == [mean]
    assert own["trained"].unique().tolist() == [(world.rank + mean) / 2]
    before.drop()


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("hvd_nodes")
def test_bfloat16_rounds_the_change_and_not_the_values(world):
    base = torch.linspace(100.0, 101.0, 1000)
    own = base.clone()
    averaging = AnchoredAveraging(
        current().comm,
        HalfCodec(torch.bfloat16),
        Tensors(lambda: [("own", own)]),
        1 << 20,
        node=node_comm(),
    )
    own.add_(1e-3 * (world.rank + 1))
    averaging.start(1.0, 1.0 / world.size)
    averaging.finish()
    change = own - base
    expected = 1e-3 * (world.size + 1) / 2
    # plus the precision of float32 near 100
    assert float((change - expected).abs().max()) < 1e-2 * expected + 1e-5


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("hvd_nodes")
def test_different_tensors_are_an_error_on_every_rank(world):
    own = torch.zeros(10 + world.rank)
    with pytest.raises(MismatchError, match="averaged tensors"):
        Averaging(current().comm, Identity(), Tensors(lambda: [("own", own)]), 1 << 20)


@EVERY_SIZE
@pytest.mark.usefixtures("hvd_nodes")
@pytest.mark.parametrize("numel", [1, 63, 64, 129, 1000])
def test_a_vector_of_a_node_is_written_in_slices_and_read_whole(numel):
    node = node_comm()
    vector = NodeVector(node, numel, torch.float64)
    vector.own.copy_(torch.arange(numel, dtype=torch.float64)[vector.bounds])
    node.barrier()
    out = torch.empty(numel, dtype=torch.float64)
    vector.read(out)
    assert torch.equal(out, torch.arange(numel, dtype=torch.float64))


ROUNDS = 12


def squared_distances(rank: int) -> list[float]:
    """Average repeatedly; return the squared distance of this rank from each average."""
    own = torch.zeros(3000, dtype=torch.float64)
    averaging = AnchoredAveraging(
        current().comm,
        Identity(),
        Tensors(lambda: [("own", own)]),
        4096,
        node=node_comm(),
    )
    found = []
    for number in range(ROUNDS):
        own += (rank + 1) * (number + 1) * torch.linspace(0.5, 1.5, 3000, dtype=own.dtype)
        averaging.start(1.0, 1.0 / current().topology.size)
        found.append(averaging.finish())
    return found


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("hvd")
def test_the_anchor_is_not_updated_while_other_ranks_read_it(world, jitter):
    sleeps = jitter()
    found = squared_distances(world.rank)
    mean = (world.size + 1) / 2
    lines = torch.linspace(0.5, 1.5, 3000, dtype=torch.float64)
    exact = [
        float(((world.rank + 1 - mean) * (number + 1) * lines).square().sum())
        for number in range(ROUNDS)
    ]
    assert found == pytest.approx(exact, rel=1e-9, abs=1e-9)
    assert sleeps.num_sleeps > ROUNDS


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name", ["local, state averaged", "hierarchical", "diloco, fragments", "staged"]
)
def test_a_local_method_gives_the_same_bits_with_late_ranks(hvd_nodes, jitter, name):
    def learnt():
        model = Normed()
        optimizer = sgd(model)
        method = METHODS[name](hvd_nodes, model, optimizer)
        train(hvd_nodes, model, optimizer, method, 0, 13)
        method.finish()
        return replica_of(model, optimizer)

    prompt = learnt()
    jitter()
    assert torch.equal(learnt(), prompt)


MANY = pytest.mark.ranks(2, 3)


def same(world, numbers: torch.Tensor) -> bool:
    return len(set(world.allgather(numbers.numpy().tobytes()))) == 1


@MANY
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_rank_without_steps_gets_the_mean_of_the_other_ranks(world, hvd_nodes, make):
    model = make_model()
    optimizer = make(model)
    method = hvd_nodes.LocalSGD(model, optimizer, 2, state="average")
    states = []
    for step in range(2):
        if world.rank == 0:
            method.skip_step()
            continue
        images, labels = part_of(global_batch(step), world.rank, world.size)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        # the state after the last step is averaged at once, so this test repeats that step
        if step == 1:
            other = make(copy := make_model())
            copy.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
            for one, two in zip(copy.parameters(), model.parameters(), strict=True):
                one.grad = two.grad.clone()
            other.step()
            states = [other.state[p] for p in copy.parameters()]
        optimizer.step()
    of_ranks = [found for found in world.allgather(states) if found]
    for parameter, *found in zip(model.parameters(), *of_ranks, strict=True):
        for key, value in optimizer.state[parameter].items():
            mean = sum(own[key] for own in found) / len(found)
            torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-15)
    assert same(world, replica_of(model, optimizer))
    method.close()


@MANY
@pytest.mark.parametrize("make", [sgd, adam])
def test_replicas_stay_identical_in_the_cool_down(world, hvd_nodes, make):
    """Also with a layer that one rank never uses and a step that it skips."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = make_model(), nn.Linear(64, 10).double()

        def forward(self, x):
            y = self.common(x)
            return y if world.rank == 0 and method.rounds.step < 8 else y + self.rare(x)

    torch.manual_seed(0)
    model = Branch()
    optimizer = make(model)
    options = {"warmup_steps": 0, "cooldown_start": 8, "steps": 4, "delay": 1}
    with hvd_nodes.StagedSGD(model, optimizer, **options) as method:
        for step in range(14):
            if step == 6 and world.rank == 0:
                method.skip_step()
            else:
                train(hvd_nodes, model, optimizer, method, step, step + 1)
            if step >= 7:
                assert same(world, weights_of(model)), step
        assert same(world, replica_of(model, optimizer))


def means_of(world, model: nn.Module, num_samples: float) -> dict[str, torch.Tensor]:
    """Return parameters and buffers averaged by number of samples, by name. Collective."""
    tensors = {n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()}
    of_ranks = world.allgather((num_samples, tensors))
    total = sum(number for number, _ in of_ranks)
    weights = [number / total if total else 1 / len(of_ranks) for number, _ in of_ranks]
    return {
        name: sum(w * own[name] for w, (_, own) in zip(weights, of_ranks, strict=True))
        for name in tensors
    }


def close(model: nn.Module, means: dict[str, torch.Tensor], names: list[str]) -> bool:
    found = model.state_dict()
    return all(torch.allclose(found[n], means[n], rtol=1e-11, atol=1e-13) for n in names)


@MANY
@pytest.mark.parametrize("name", METHODS)
def test_averages_count_only_the_samples_of_steps_taken(world, hvd_nodes, name):
    """Rank 0 skips steps, with and without ``set_num_samples``; their samples do not count."""
    run, counted, wrong = Run(hvd_nodes, name, model=Normed()), 0, []
    has_gradients_in_common = name in ("post local", "staged", "hierarchical, synchronous node")
    skipped = (5, 8) if has_gradients_in_common else (0, 5, 8)
    names = [n for n, t in run.model.state_dict().items() if t.is_floating_point()]
    if "diloco" in name:  # parameters become those of the outer model
        names = [n for n, _ in run.model.named_buffers() if "num" not in n]
    with run.method as method:
        for step in range(11):
            start, is_skipped = method.rounds.start, step in skipped and world.rank == 0
            number = 3 + 2 * world.rank + step
            if not is_skipped or step == 5:
                method.set_num_samples(number, nominal=8)
            if is_skipped:
                run.skip()
            else:
                run.to(step + 1)
                counted += number
            counted *= method.rounds.start == start
            if step == 0:  # rank 0 has not set a number of samples yet
                continue
            before = run.replica
            expected = means_of(world, run.model, counted)
            with method.averaged():
                if not method.rounds.agrees and not close(run.model, expected, names):
                    wrong.append(step)
            assert torch.equal(before, run.replica)
        is_apart = not (method.rounds.agrees or method._exchange.is_in_flight)
    assert wrong == []
    if is_apart and "bf16" not in name:
        assert close(run.model, expected, names)
