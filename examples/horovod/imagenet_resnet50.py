"""Train ResNet-50 on images of an HDF5 file, with the structure of an ImageNet training.

    python imagenet_resnet50.py --depth 14 --width 8 --image-size 32 --num-train 256
    horovodrun -np 4 python imagenet_resnet50.py --epochs 90 --warmup-epochs 5
    hpctrain launch -n 4 -- hpctrain shim imagenet_resnet50.py --checkpoints runs/resnet
    mpirun -n 4 python imagenet_resnet50.py --batches-per-allreduce 4 --fp16-allreduce

The images are synthetic: rank 0 writes the file in the first run, and each rank reads only the
images of its batches. The learning rate is scaled with the global batch, with a warm-up, and
divided by ten after 1/3, 2/3 and 8/9 of the epochs: 30, 60 and 80 of 90. With --checkpoints a
restarted run continues after its last complete epoch. The last line is the mean loss on test
images.
"""

import argparse
from pathlib import Path

import h5py
import horovod.torch as hvd
import numpy as np
import torch
from resnet import BLOCKS, ResNet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("runs/horovod"), help="folder of images (%(default)s)")
    add("--num-train", type=int, default=512, help="images to learn (%(default)s)")
    add("--num-test", type=int, default=128, help="images to test (%(default)s)")
    add("--num-classes", type=int, default=16, help="kinds of images (%(default)s)")
    add("--image-size", type=int, default=64, help="pixels of a side (%(default)s)")
    add("--depth", type=int, choices=BLOCKS, default=50, help="layers (%(default)s)")
    add("--width", type=int, default=64, help="channels of the first stage (%(default)s)")
    add("--epochs", type=int, default=9, help="how often each image is seen (%(default)s)")
    add("--warmup-epochs", type=float, default=1, help="until the full rate (%(default)s)")
    add("--batch-size", type=int, default=16, help="images of a backward pass (%(default)s)")
    add("--batches-per-allreduce", type=int, default=1, help="passes of a step (%(default)s)")
    add("--base-lr", type=float, default=0.0125, help="rate of one pass of a rank (%(default)s)")
    add("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=float, default=5e-5, help="of SGD (%(default)s)")
    add("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    add("--checkpoints", type=Path, help="folder of checkpoints, of which the last is taken up")
    add("--workers", type=int, default=0, help="reading processes of a rank (%(default)s)")
    add("--seed", type=int, default=42, help="of weights, images and order (%(default)s)")
    return parser.parse_args()


class Images(Dataset):
    """Images and classes in an HDF5 file, which each process opens at its first read."""

    def __init__(self, path: Path, split: str) -> None:
        self.path, self.split = path, split
        self.file: h5py.File | None = None
        with h5py.File(path) as file:
            self.length = len(file[split]["class"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = h5py.File(self.path)
        group = self.file[self.split]
        image = torch.from_numpy(group["image"][index]).float() / 255 - 0.5
        return image, int(group["class"][index])


def data_file(args: argparse.Namespace) -> Path:
    """Return the path of the file of images, which rank 0 writes if it is missing."""
    sizes = f"{args.num_train}+{args.num_test}x{args.image_size}x{args.num_classes}"
    path = args.data / f"images-{sizes}-{args.seed}.h5"
    if hvd.rank() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with h5py.File(part, "w") as file:
            write_images(file, args)
        part.replace(path)  # the rename is atomic, so no process reads a partial file
        print(f"wrote {path}", flush=True)
    hvd.barrier()
    return path


def write_images(file: h5py.File, args: argparse.Namespace) -> None:
    """Write images of a coarse pattern per class, with noise."""
    rng = np.random.default_rng(args.seed)
    side = args.image_size
    patterns = rng.uniform(64, 192, (args.num_classes, 3, 4, 4))
    enlarged = patterns.repeat(-(-side // 4), axis=2).repeat(-(-side // 4), axis=3)
    for split, num_images in (("train", args.num_train), ("test", args.num_test)):
        group = file.create_group(split)
        group["class"] = np.arange(num_images) % args.num_classes
        shape = (num_images, 3, side, side)
        images = group.create_dataset("image", shape, "uint8", chunks=(1, *shape[1:]))
        for index, number in enumerate(group["class"][:]):
            noisy = enlarged[number, :, :side, :side] + rng.normal(0, 64, shape[1:])
            images[index] = noisy.clip(0, 255)


def rate(args: argparse.Namespace, epoch: float) -> float:
    """Return the learning rate at a fractional epoch."""
    full = args.base_lr * args.batches_per_allreduce * hvd.size()
    if epoch < args.warmup_epochs:
        return args.base_lr + (full - args.base_lr) * epoch / args.warmup_epochs
    return full * 0.1 ** sum(epoch >= args.epochs * part for part in (1 / 3, 2 / 3, 8 / 9))


def train(
    args: argparse.Namespace,
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader,
) -> None:
    """Train on the part of this rank of one epoch."""
    model.train()
    batches.sampler.set_epoch(epoch)
    for number, (images, classes) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(args, epoch + number / len(batches))
        optimizer.zero_grad()
        step_loss = 0.0
        passes = (images.split(args.batch_size), classes.split(args.batch_size))
        for some, their_classes in zip(*passes, strict=True):
            loss = cross_entropy(model(some), their_classes) / args.batches_per_allreduce
            loss.backward()  # the last call averages the accumulated gradients
            step_loss += loss.item()
        optimizer.step()
        if hvd.rank() == 0 and number % 10 == 0:
            progress = f"epoch {epoch + 1}/{args.epochs}  step {number}/{len(batches)}"
            print(f"{progress}  loss {step_loss:.4f}", flush=True)


def average_statistics(model: nn.Module) -> None:
    """Average the statistics of batch normalization, so that they match the checkpoint."""
    handles = [
        hvd.allreduce_async_(buffer, name=name)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    ]
    for handle in handles:
        hvd.synchronize(handle)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Return the loss and the accuracy on the test images of all ranks."""
    model.eval()
    sums = torch.zeros(3)
    for images, classes in batches:
        scores = model(images)
        sums[0] += cross_entropy(scores, classes, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == classes).sum()
        sums[2] += len(classes)
    loss, num_right, num_images = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return loss / num_images, num_right / num_images


def resume(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, broadcast the state of rank 0, and return the finished epochs."""
    epoch = 0
    if hvd.rank() == 0 and args.checkpoints is not None:
        done = [
            int(path.stem.removeprefix("epoch-")) for path in args.checkpoints.glob("epoch-*.pt")
        ]
        epoch = max(done, default=0)
    # Ranks on other nodes may not see the folder.
    epoch = int(hvd.broadcast(torch.tensor(epoch), root_rank=0, name="epoch"))
    if epoch > 0:
        if hvd.rank() == 0:
            kept = torch.load(args.checkpoints / f"epoch-{epoch}.pt")
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            print(f"goes on after epoch {epoch}", flush=True)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Last: to make an optimizer's state Horovod takes a step, in which weights decay.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return epoch


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch-{epoch}.pt"
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.replace(path)


def loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return the training and test batches of this rank."""
    path = data_file(args)
    made = []
    for split, size in (("train", args.batch_size * args.batches_per_allreduce), ("test", 32)):
        data, training = Images(path, split), split == "train"
        sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=training)
        options = {"drop_last": training, "num_workers": args.workers}
        made.append(DataLoader(data, size, sampler=sampler, **options))
    return made[0], made[1]


def main(args: argparse.Namespace) -> None:
    """Train from the last checkpoint to the last epoch, and print the results."""
    hvd.init()
    torch.manual_seed(args.seed)
    train_batches, test_batches = loaders(args)
    model = ResNet(args.depth, args.width, args.num_classes)
    optimizer = torch.optim.SGD(
        model.parameters(), args.base_lr, args.momentum, weight_decay=args.weight_decay
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )
    num_done = resume(args, model, optimizer)
    if num_done >= args.epochs:
        loss, _ = evaluate(model, test_batches)
    for epoch in range(num_done, args.epochs):
        train(args, epoch, model, optimizer, train_batches)
        average_statistics(model)
        loss, accuracy = evaluate(model, test_batches)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {accuracy:.4f}", flush=True)
            if args.checkpoints is not None:
                save(args.checkpoints, epoch + 1, model, optimizer)
    if hvd.rank() == 0:
        print(f"final loss {loss:.9f}")


if __name__ == "__main__":
    main(arguments())
