"""Train a language model in any layout: replicas, shards, tensor parallel, and several at once.

    python examples/lm/train.py
    hpctrain launch -n 4 -- python examples/lm/train.py                   # replicas (DDP)
    hpctrain launch -n 4 -- python examples/lm/train.py --fsdp            # sharded (FSDP2)
    hpctrain launch -n 4 -- python examples/lm/train.py --tp 2 --fsdp     # two by two

All of them learn from the same batches and reach the same loss. The state is saved at the end:
``--resume`` goes on with it, in any layout, and ``generate.py`` writes text.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import batch, open_text
from model import ROLES, Transformer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hpctrain as hvd
from hpctrain.parallel import build_mesh, tensor_parallel

TEST_BATCHES = 4
Facts = dict[str, int | float]
"""What generate.py and a run that goes on want to know besides the state."""


def options_of(words: list[str] | None) -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide each matrix")
    parser.add_argument("--sequence", action="store_true", help="and what lies between blocks")
    parser.add_argument("--fsdp", action="store_true", help="shard replicas over the other ranks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step, of all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/lm"))
    parser.add_argument("--data", type=Path, default=Path("runs/lm-data"))
    parser.add_argument("--resume", action="store_true", help="go on with what --output has")
    return parser.parse_args(words)


def parallel(model: nn.Module, mesh: DeviceMesh, options: Namespace) -> nn.Module:
    """Divide matrices first, then what is left among replicas."""
    if options.tp > 1:
        model = tensor_parallel(model, mesh["tp"], ROLES, sequence=options.sequence)
    if options.fsdp:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])
    if mesh["dp"].size() > 1:
        if options.tp > 1:
            raise SystemExit("replicas of tensor parallel ranks are sharded: add --fsdp")
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    return model


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean of the nats that a byte costs, given those before it."""
    scores = model(windows[:, :-1])
    return cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def mean_over(mesh: DeviceMesh, loss: Tensor) -> float:
    """Average a loss over the replicas. Collective."""
    local = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach().clone()
    dist.all_reduce(local, op=dist.ReduceOp.AVG, group=mesh["dp"].get_group())
    return local.item()


def main(words: list[str] | None = None) -> None:
    """Train, test, and save."""
    options = options_of(words)
    mesh = build_mesh(tp=options.tp)
    text = open_text(hvd.current().comm, options.data, options.length)
    torch.manual_seed(options.seed)  # the same first weights on every rank, in every layout
    shape = {"width": options.width, "depth": options.depth, "num_heads": options.heads}
    model = parallel(Transformer(**shape), mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    first = load(model, optimizer, options.output) if options.resume else 0
    place = (options.batch, mesh["dp"].get_local_rank(), mesh["dp"].size())
    for step in range(first, options.steps):
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(model, batch(text["train"], step, *place))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 10 == 0:
            tell(f"step {step + 1}  loss {mean_over(mesh, loss):.4f}")
    with torch.no_grad(), loss_parallel():
        tested = (loss_of(model, batch(text["test"], i, *place)) for i in range(TEST_BATCHES))
        tested_loss = sum(mean_over(mesh, one) for one in tested) / TEST_BATCHES
    tell(f"test loss {tested_loss:.4f} nats per byte")
    save(model, optimizer, options.output, {**shape, "step": options.steps, "loss": tested_loss})
    dist.destroy_process_group()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, facts: Facts) -> None:
    """Write what any layout can read again. Collective."""
    weights, state = get_state_dict(model, optimizer)
    place = folder / f"step-{facts['step']}"
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
    if hvd.rank() == 0:  # last of all: it names the state that is whole
        (folder / "facts.json").write_text(json.dumps(facts))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Read what any layout has written; return after how many steps. Collective."""
    step = int(json.loads((folder / "facts.json").read_text())["step"])
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return step


def tell(words: str) -> None:
    """Print on one rank."""
    if hvd.rank() == 0:
        print(words, flush=True)


if __name__ == "__main__":
    main()
