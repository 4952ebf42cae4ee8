"""Train models divided between ranks on CUDA, and compare with one process on the CPU.

Usage: ``meshes.py [NAME ...]``, started by any launcher. NCCL sends the tensors. With NCCL 2.30 or
later, ranks may share a GPU.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import hpctrain as hvd
from hpctrain.parallel import Pipeline, build_mesh, hybrid_mesh, shard, tensor_parallel
from tests.parallel.training import CLIP, adamw, batches, check, lm, loss_of, transformer

CARD = torch.device("cuda")


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, named: nn.Module) -> None:
    """Train on this rank's rows."""
    losses = []
    for batch in batches():
        given, following = (mine(x).to(CARD) for x in batch)
        optimizer.zero_grad()
        loss = loss_of(model(given), following)
        loss.backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(CLIP)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        losses.append(loss.item())
    compare(losses, named)


def compare(losses: list[float], named: nn.Module) -> None:
    whole = (
        (name, (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu())
        for name, p in named.named_parameters()
    )
    check(losses, whole)


def by_ddp() -> None:
    dist.init_process_group("hpctrain")
    model = transformer().to(CARD)
    trained(DistributedDataParallel(model), adamw(model.parameters()), model)


def by_stage(stage: int) -> Callable[[], None]:
    def program() -> None:
        mesh = build_mesh(device="cuda")["dp"]
        model = transformer()
        trained(model, shard(model, adamw(model.parameters()), stage=stage, mesh=mesh), model)

    return program


def by_replicas() -> None:
    mesh = hybrid_mesh(build_mesh(device="cuda")["dp"])
    model = transformer()
    trained(model, shard(model, adamw(model.parameters()), stage=3, mesh=mesh), model)


def by_rows(*, sequence: bool) -> Callable[[], None]:
    def program() -> None:
        mesh = build_mesh(tp=hvd.size(), device="cuda")["tp"]
        model = tensor_parallel(transformer().to(CARD), mesh, lm.ROLES, sequence=sequence)
        optimizer, losses = adamw(model.parameters()), []
        for batch in batches():
            given, following = (x.to(CARD) for x in batch)
            optimizer.zero_grad()
            with loss_parallel():
                loss = loss_of(model(given), following)
                loss.backward()
            losses.append(loss.full_tensor().item())
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        compare(losses, model)

    return program


def by_stages() -> None:
    mesh = build_mesh(pp=hvd.size(), device="cuda")
    options = {"loss": loss_of, "num_microbatches": 4}
    pipeline = Pipeline(transformer().to(CARD), mesh["pp"], lm.LAYERS, **options)
    optimizer, losses = adamw(pipeline.model.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        losses.append(pipeline.step(*(x.to(CARD) for x in batch)).item())
        pipeline.clip_grad_norm_(CLIP)
        optimizer.step()
    compare(losses, pipeline.model)


PROGRAMS: dict[str, Callable[[], None]] = {
    "ddp": by_ddp,
    **{f"stage {n}": by_stage(n) for n in (1, 2, 3)},
    "replicas of shards": by_replicas,
    "tensor": by_rows(sequence=False),
    "sequence": by_rows(sequence=True),
    "pipeline": by_stages,
}

if __name__ == "__main__":
    hvd.init()
    for name in sys.argv[1:] or PROGRAMS:
        PROGRAMS[name]()
        if hvd.rank() == 0:
            sys.stdout.write(f"{name} holds\n")
            sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
