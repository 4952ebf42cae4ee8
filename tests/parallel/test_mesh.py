"""A mesh keeps the groups with most traffic inside nodes, and reports traffic between nodes."""

import pytest
import torch
import torch.distributed as dist

import hpctrain
from hpctrain import ConfigError, MismatchError, TopologyError
from hpctrain.parallel import build_mesh, placement, tensor_parallel
from hpctrain.parallel.mesh import packed
from tests.parallel.conftest import started


def groups(order, sizes, axis):
    """Return the ranks of each group along an axis; axis 0 is the innermost."""
    mesh = torch.tensor(order).view(*reversed(sizes))
    return mesh.movedim(len(sizes) - 1 - axis, -1).reshape(-1, sizes[axis]).tolist()


def crossing(nodes, found):
    """Return the number of groups with ranks on several nodes."""
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    return sum(len({node_of[rank] for rank in group}) > 1 for group in found)


@pytest.mark.parametrize(
    "nodes",
    [
        [range(4), range(4, 8)],
        [range(0, 8, 2), range(1, 8, 2)],  # the numbering of `mpirun --map-by node`
        [range(3), range(3, 8)],
        [range(8)],
        [[rank] for rank in range(8)],
    ],
)
@pytest.mark.parametrize("sizes", [(2, 1, 2, 2), (4, 1, 1, 2), (1, 2, 2, 2), (2, 2, 2, 1)])
def test_every_rank_has_one_place_and_fewest_inner_groups_cross_nodes(nodes, sizes):
    order = packed(nodes, sizes)
    assert sorted(order) == list(range(8))
    assert order[0] == 0
    inner = next((axis for axis, size in enumerate(sizes) if size > 1))
    fewest = 8 // sizes[inner] - sum(len(ranks) // sizes[inner] for ranks in nodes)
    assert crossing(nodes, groups(order, sizes, inner)) == fewest


def test_blocks_of_two_axes_fill_a_node_before_the_next():
    nodes = [range(0, 8, 2), range(1, 8, 2)]
    assert packed(nodes, (2, 1, 2, 2)) == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.ranks(4)
def test_the_mesh_follows_the_nodes_and_is_reported_once(capfd, world):
    stages, layers = "activations from stage to stage (pp)", "activations of every layer (tp)"
    both = f"{stages} and {layers}"
    cases = (None, both, "nothing"), (2, layers, stages), (1, "nothing", both)
    for per_node, inside, across in cases:
        with started(per_node):
            mesh = build_mesh(tp=2, pp=2)
            ranks, sizes = mesh.mesh.tolist(), [mesh[axis].size() for axis in mesh.mesh_dim_names]
            total = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(total, group=mesh["pp"].get_group())
        output = capfd.readouterr().err
        assert ranks == [[[[0, 1]], [[2, 3]]]]
        assert sizes == [1, 2, 1, 2]
        assert total.item() == 2 * (world.rank % 2) + 2
        if world.rank == 0:
            assert f"between nodes: {across}; inside a node: {inside}" in output
            assert ("slow: tp=2 does not fit on nodes of 1 ranks" in output) == (per_node == 1)
        else:
            assert "mesh of" not in output


@pytest.mark.ranks(2, 3, 4)
def test_impossible_meshes_are_an_error_on_all(world):
    with started():
        with pytest.raises(
            TopologyError, match=f"number of ranks, {world.size}, got .*tp=5, with the product 5"
        ):
            build_mesh(tp=5)
        with pytest.raises(TopologyError, match=f"number of ranks, {world.size}, got dp=7"):
            build_mesh(dp=7)
        with pytest.raises(TopologyError, match="must be at least 1"):
            build_mesh(tp=0)
        with pytest.raises(MismatchError, match="rank 0: dp=1 x"):
            build_mesh(**{"tp" if world.rank else "cp": world.size})
        with pytest.raises(MismatchError, match="on cpu"):
            build_mesh(device="meta" if world.rank else "cpu")
        with pytest.raises(ConfigError, match="device of a mesh, but 'xpu'"):
            build_mesh(device="xpu")
        assert build_mesh().size() == world.size


@pytest.mark.ranks(2)
def test_meshes_of_torch_are_described():
    with started(1):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert "slow: tp=2" in placement(mesh)
        assert "data of axis 0" in placement(dist.init_device_mesh("cpu", (2,)))


@pytest.mark.ranks(2)
def test_build_mesh_starts_world_and_process_group():
    mesh = build_mesh(tp=2)
    assert dist.get_backend() == "hpctrain"
    assert mesh["tp"].get_local_rank() == hpctrain.rank()
    dist.destroy_process_group()
    hpctrain.shutdown()


@pytest.mark.ranks(2)
def test_a_divided_model_without_groups_does_not_affect_other_optimizers():
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with started():
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        tensor_parallel(model, build_mesh(tp=2)["tp"], {"0": "column", "1": "row"})
        if dist.get_rank():
            optimizer.step()  # this step does not synchronize with other ranks
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.step()
    assert len(list(model.parameters())) == 4


@pytest.mark.ranks(4)
def test_parameters_are_on_the_mesh_of_the_present_world():
    for number in range(2):
        with started():
            for _ in range(number):  # so that group names differ from those of the previous world
                dist.new_group([0])
            model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
            rows = build_mesh(tp=2)["tp"]
            tensor_parallel(model, rows, {"0": "column", "1": "row"})
            groups = [parameter.device_mesh.get_group() for parameter in model.parameters()]
            assert groups == [rows.get_group()] * 4
            model(torch.ones(1, 2)).sum().backward()
