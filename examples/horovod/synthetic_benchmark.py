"""Measure the images per second of training on random images in memory.

    python synthetic_benchmark.py --model mlp
    horovodrun -np 4 python synthetic_benchmark.py
    hpctrain launch -n 4 -- hpctrain shim synthetic_benchmark.py --depth 26 --image-size 32
    mpirun -n 4 python synthetic_benchmark.py --num-iters 20 --fp16-allreduce

Each iteration times several steps. The script prints the mean rate with a 95 % confidence
interval. The last line is the mean loss of the last step, for comparisons of engines.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch
from resnet import BLOCKS, ResNet
from torch import nn
from torch.nn.functional import cross_entropy

Z95 = 1.96
"""Half the 95 % interval of a mean in its standard errors."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("resnet", "mlp"), default="resnet", help="(%(default)s)")
    add("--depth", type=int, choices=BLOCKS, default=50, help="layers of resnet (%(default)s)")
    add("--width", type=int, default=64, help="channels of its first stage; mlp: x 16 units")
    add("--image-size", type=int, default=64, help="pixels of a side (%(default)s)")
    add("--batch-size", type=int, default=16, help="images of a rank in a step (%(default)s)")
    add("--num-warmup-batches", type=int, default=3, help="steps before the clock (%(default)s)")
    add("--num-batches-per-iter", type=int, default=3, help="steps of a rate (%(default)s)")
    add("--num-iters", type=int, default=5, help="how many rates (%(default)s)")
    add("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    add("--use-adasum", action="store_true", help="combine steps by Adasum, do not average")
    add("--lr", type=float, default=0.001, help="learning rate of one rank (%(default)s)")
    add("--seed", type=int, default=42, help="of weights and images (%(default)s)")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> nn.Module:
    """Make the network that ``--model`` names."""
    if args.model == "resnet":
        return ResNet(args.depth, args.width)
    units = 16 * args.width
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * args.image_size**2, units),
        nn.ReLU(),
        nn.Linear(units, units),
        nn.ReLU(),
        nn.Linear(units, 1000),
    )


def make_step(args: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return what makes a step and gives its loss on this rank."""
    torch.manual_seed(args.seed)
    model = make_model(args)
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    torch.manual_seed(args.seed + hvd.rank())  # different images on each rank
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(1000, (args.batch_size,))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def interval(rates: Sequence[float]) -> str:
    """Write a mean of rates and the half of its confidence interval."""
    spread = statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else 0.0
    return f"{statistics.mean(rates):.1f} +- {Z95 * spread:.1f} images/s"


def measure(args: argparse.Namespace, step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Print the rates of each rank and of all together; return the last loss of this rank."""
    loss = torch.tensor(float("nan"))
    for _ in range(args.num_warmup_batches):
        loss = step()
    rates = []
    for number in range(args.num_iters):
        begin_s = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            loss = step()
        taken_s = time.perf_counter() - begin_s
        rates.append(args.batch_size * args.num_batches_per_iter / taken_s)
        if hvd.rank() == 0:
            print(f"iteration {number + 1}/{args.num_iters}  {rates[-1]:.1f} images/s", flush=True)

    of_ranks = hvd.allgather(torch.tensor([rates]), name="rates").tolist()
    if hvd.rank() == 0:
        for rank, mine in enumerate(of_ranks):
            print(f"rank {rank}: {interval(mine)}")
        total = [sum(at_once) for at_once in zip(*of_ranks, strict=True)]
        print(f"total of {hvd.size()} ranks: {interval(total)}", flush=True)
    return loss


def main(args: argparse.Namespace) -> None:
    """Measure, and print the last loss."""
    hvd.init()
    loss = measure(args, make_step(args))
    loss = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print(f"final loss {loss.item():.9f}")


if __name__ == "__main__":
    main(arguments())
