"""Check that the parameters of all ranks equal the parameters of the root after a broadcast."""

import pytest
import torch
from torch import nn

from hpctrain.core.errors import CommError, ConfigError, MismatchError

SIZES = pytest.mark.ranks(1, 2, 3, 4)


def model_of(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    model[1].num_batches_tracked.fill_(rank)
    return model


WAYS = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: model.named_parameters(),
    "list of them": lambda model: list(model.named_parameters()),
    "parameters": lambda model: list(model.parameters()),
}


@SIZES
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_name_parameters(hvd, way):
    root = hvd.size() - 1
    model = model_of(hvd.rank())
    params = way(model)
    is_state = isinstance(params, dict)
    hvd.broadcast_parameters(params, root_rank=root)
    assert all(bool((p == root).all()) for p in model.parameters())
    assert all(p.requires_grad and p.grad_fn is None for p in model.parameters())
    assert model[1].num_batches_tracked.item() == (root if is_state else hvd.rank())


@SIZES
def test_mapping_is_broadcast_by_name_in_any_layout_and_dtype(hvd):
    rank, root = hvd.rank(), hvd.size() - 1
    dtypes = (torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
    tensors = {str(dtype): torch.full((2, 3), rank, dtype=dtype).t() for dtype in dtypes}
    tensors["scalar"], tensors["empty"] = torch.tensor(rank), torch.empty(0)
    names = sorted(tensors, reverse=bool(rank % 2))
    hvd.broadcast_parameters({name: tensors[name] for name in names}, root)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.full_like(tensor, root)), name
    hvd.broadcast_parameters({})


@SIZES
def test_values_other_than_dense_tensors_are_rejected(hvd):
    with pytest.raises(ConfigError, match="epoch is a int; use broadcast_object"):
        hvd.broadcast_parameters({"epoch": 3})
    with pytest.raises(ConfigError, match="got a int"):
        hvd.broadcast_parameters(3)
    with pytest.raises(ConfigError, match="weight is sparse"):
        hvd.broadcast_parameters([("weight", torch.eye(2).to_sparse())])


@SIZES
def test_tensors_without_elements_share_no_memory(hvd):
    empty = torch.zeros(3, 0, 2)
    hvd.broadcast_parameters({"empty": empty.as_strided((3, 0, 2), (0, 0, 0)), "p": torch.ones(2)})


@pytest.mark.ranks(2, 3)
def test_parameter_that_one_rank_cannot_replace_raises_on_all_ranks(hvd):
    expanded = torch.zeros(()).expand(4)
    for odd in (expanded, torch.eye(4)[0].to_sparse(), "text"):
        with pytest.raises(MismatchError, match="q is"):
            hvd.broadcast_parameters({"q": odd if hvd.rank() == 1 else torch.zeros(4)})
    with pytest.raises(ConfigError, match=r"q is expanded, .* clone\(\)"):
        hvd.broadcast_parameters({"q": expanded})
    assert hvd.allreduce(torch.ones(1)).item() == 1


@pytest.mark.ranks(2, 3, 4)
def test_other_shapes_are_refused_on_every_rank(hvd):
    shape = (2, 3) if hvd.rank() == 0 else (3, 2)
    with pytest.raises(CommError, match=r"weight \(2, 3\)"):
        hvd.broadcast_parameters({"weight": torch.zeros(shape)})


@pytest.mark.ranks(2, 3, 4)
def test_only_the_ranks_of_the_set_change(hvd):
    one = hvd.add_process_set(range(1, hvd.size()))
    model = model_of(hvd.rank())
    if one.included():
        hvd.broadcast_parameters(model.state_dict(), root_rank=1, process_set=one)
    assert bool((model[0].weight == min(hvd.rank(), 1)).all())
