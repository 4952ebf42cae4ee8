"""Train a language model with any combination of data, tensor, pipeline and context parallelism.

    python examples/lm/train.py
    hpctrain launch -n 4 -- python examples/lm/train.py                   # replicas (DDP)
    hpctrain launch -n 4 -- python examples/lm/train.py --fsdp            # sharded (FSDP2)
    hpctrain launch -n 4 -- python examples/lm/train.py --tp 2 --fsdp     # two by two
    hpctrain launch -n 8 -- python examples/lm/train.py --tp 2 --pp 2 --fsdp   # with stages

All layouts use the same batches and reach the same loss. The state is saved at the end:
``--resume`` continues from it in any layout, and ``generate.py`` writes text.
"""

import json
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import batch, open_text
from model import LAYERS, ROLES, Transformer, loss_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import hpctrain as hvd
from hpctrain.parallel import (
    Pipeline,
    build_mesh,
    gradient_mesh,
    tensor_parallel,
)

TEST_BATCHES = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Stores optimizer state by the name of its parameter, for any layout."""
Facts = dict[str, int | float]
"""Values that ``generate.py`` and ``--resume`` need in addition to the state."""


def options_of(words: list[str] | None) -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide each matrix")
    parser.add_argument(
        "--sequence", action="store_true", help="divide activations between blocks too"
    )
    parser.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--schedule", default="1f1b", help="schedule of the pipeline")
    parser.add_argument("--cp", type=int, default=1, help="ranks that divide the sequence")
    parser.add_argument("--fsdp", action="store_true", help="shard replicas over the other ranks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/lm"))
    parser.add_argument("--data", type=Path, default=Path("runs/lm-data"))
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    return parser.parse_args(words)


class Plain:
    """A model that is no pipeline, with the methods of one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, given: Tensor, following: Tensor) -> Tensor:
        """Compute gradients, and return the loss."""
        loss = loss_of(self.model(given), following)
        loss.backward()
        return whole(loss.detach())

    def evaluate(self, given: Tensor, following: Tensor) -> Tensor:
        """Return the loss."""
        with torch.no_grad():
            return whole(loss_of(self.model(given), following))

    def clip_grad_norm_(self, most: float) -> None:
        """Clip the norm of all gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), most)


def parallel(model: Transformer, mesh: DeviceMesh, options: Namespace) -> Plain | Pipeline:
    """Apply tensor parallelism, then the pipeline, then replicas or shards."""
    if options.tp > 1:
        tensor_parallel(model, mesh["tp"], ROLES, sequence=options.sequence)
    if options.cp > 1:
        model.parallel_context(mesh["cp"])
    if options.fsdp:
        for block in model.blocks:
            fully_shard(block, mesh=gradient_mesh(mesh))
    wrap = partial(replicas, mesh=gradient_mesh(mesh), options=options)
    if options.pp == 1:
        return Plain(wrap(model))
    cut = {"num_microbatches": 2 * options.pp, "schedule": options.schedule}
    return Pipeline(model, mesh["pp"], LAYERS, loss=loss_of, wrap=wrap, **cut)


def replicas(model: nn.Module, mesh: DeviceMesh, options: Namespace) -> nn.Module:
    """Shard a model, or average the gradients of its replicas."""
    if options.fsdp:
        return fully_shard(model, mesh=mesh)
    if mesh.size() == 1:
        return model
    if options.tp > 1:
        raise SystemExit("replicas of tensor parallel ranks are sharded: add --fsdp")
    return DistributedDataParallel(model, process_group=mesh.get_group())


def whole(loss: Tensor) -> Tensor:
    """Return the full tensor of a result of tensor parallel ranks."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def main(words: list[str] | None = None) -> None:
    """Train, test, and save."""
    options = options_of(words)
    mesh = build_mesh(tp=options.tp, pp=options.pp, cp=options.cp)
    text = open_text(hvd.current().comm, options.data, options.length)
    torch.manual_seed(options.seed)  # identical initial weights on all ranks in all layouts
    shape = {"width": options.width, "depth": options.depth, "num_heads": options.heads}
    trainer = parallel(Transformer(**shape), mesh, options)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=options.rate)
    first = load(trainer.model, optimizer, options.output) if options.resume else 0
    dp, cp = mesh["dp"], mesh["cp"]

    def windows(split: str, step: int) -> tuple[Tensor, Tensor]:
        """Return bytes and next bytes of the windows of this replica, and of this rank's part."""
        found = batch(text[split], step, options.batch, dp.get_local_rank(), dp.size())
        given, following = (
            part.chunk(cp.size(), dim=1)[cp.get_local_rank()]
            for part in (found[:, :-1], found[:, 1:])
        )
        return given, following

    def mean(loss: Tensor) -> float:
        """Average over replicas and parts of the sequence."""
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=gradient_mesh(mesh).get_group())
        return loss.item()

    with loss_parallel():
        for step in range(first, options.steps):
            optimizer.zero_grad()
            loss = mean(trainer.step(*windows("train", step)))
            trainer.clip_grad_norm_(1.0)
            optimizer.step()
            if (step + 1) % 10 == 0:
                tell(f"step {step + 1}  loss {loss:.4f}")
        facts = {**shape, "step": options.steps}
        save(trainer.model, optimizer, options.output, facts)  # even if a later step fails
        tested = [mean(trainer.evaluate(*windows("test", i))) for i in range(TEST_BATCHES)]
    loss = sum(tested) / TEST_BATCHES
    tell(f"test loss {loss:.4f} nats per byte")
    if options.pp > 1:
        tell(trainer.report())
    write(options.output, {**facts, "loss": loss})
    dist.destroy_process_group()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, facts: Facts) -> None:
    """Write a checkpoint that any layout can load. Collective."""
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    place = folder / f"step-{facts['step']}"
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
    write(folder, facts)  # written last: it marks the state as complete


def write(folder: Path, facts: Facts) -> None:
    """Write the values for ``generate.py`` and ``--resume``, on one rank."""
    if hvd.rank() == 0:
        (folder / "facts.json").write_text(json.dumps(facts))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Read what any layout has written; return after how many steps. Collective."""
    step = int(json.loads((folder / "facts.json").read_text())["step"])
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    message = {"model_state_dict": weights, "optim_state_dict": state}
    set_state_dict(model, optimizer, **message, options=FLAT)
    return step


def tell(words: str) -> None:
    """Print on one rank."""
    if hvd.rank() == 0:
        print(words, flush=True)


if __name__ == "__main__":
    main()
