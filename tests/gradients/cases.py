"""Define the cases, and the two sides of a comparison: ranks, or one process with all rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

ROWS = 12  # samples of a global batch, divisible by 2 and 3


class Net(nn.Module):
    """Define a network with a body and two heads, small enough for hundreds of runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.other = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.body(x))
        return self.head(y) + 2 * self.other(y)


@dataclass
class Side:
    """Run one side of the comparison: a rank with its rows, or one process with all rows."""

    rank: int
    size: int
    wrap: Callable[..., torch.optim.Optimizer]
    factor: int  # multiplies the mean gradient: the number of ranks for op=Sum

    def __post_init__(self) -> None:
        self.net = Net()
        self.make()

    @property
    def is_alone(self) -> bool:
        return self.size == 0

    def make(self, lr: float = 0.1) -> torch.optim.Optimizer:
        plain = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.optimizer = self.wrap(plain)
        return self.optimizer

    def x(self, batch: int = 0) -> Tensor:
        rows = torch.randn(
            ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(batch)
        )
        if self.is_alone:
            return rows
        share = ROWS // self.size
        return rows[self.rank * share : (self.rank + 1) * share]

    def loss(self, batch: int = 0, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x = self.x(batch).to(self.net.body.weight.dtype)
        scale = self.factor if self.is_alone else 1
        return (of or self.net)(x).square().mean() * scale

    def backward(self, batch: int = 0) -> None:
        self.loss(batch).backward()

    def closure(self, batch: int) -> Callable[[], Tensor]:
        def again() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        return again

    def begin(self) -> None:
        """Take two steps, so that later gradients are sent during backward."""
        self.step(7)
        self.step(8)

    def head_then_other(self, change: Callable[[], object]) -> None:
        """Step on two losses that share no parameter; call ``change`` between the backwards."""
        self.optimizer.zero_grad()
        self.loss(0, lambda x: self.net.head(torch.tanh(x))).backward()
        change()
        self.loss(1, lambda x: self.net.other(torch.tanh(x))).backward()
        self.optimizer.step()

    def step(self, batch: int = 0) -> None:
        self.optimizer.zero_grad()
        self.backward(batch)
        self.optimizer.step()


CASES: dict[str, Callable[[Side], None]] = {}
OPS = ("Average", "Sum")
CAN: dict[str, list[str]] = {}  # reduction operations that a case supports
REFUSED: set[str] = set()  # cases that raise an error on all ranks


def case(*ops: str, name: str = "") -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    def enter(function: Callable[[Side], None]) -> Callable[[Side], None]:
        key = name or function.__name__
        CASES[key] = function
        CAN[key] = [op for op in OPS if op in ops or not {*ops} & {*OPS}]
        if "refused" in ops:
            REFUSED.add(key)
        return function

    return enter


def between_backward_and_step(side: Side, change: Callable[[Net], object]) -> None:
    side.backward()
    change(side.net)
    side.optimizer.step()
    side.step(1)


def between_two_backwards(side: Side, change: Callable[[Net], object]) -> None:
    side.backward()
    change(side.net)
    side.backward(1)
    side.optimizer.step()


def between_two_passes(side: Side, change: Callable[[Net], object]) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    with_passes(side, 2)
    between_two_backwards(side, change)


def after_one_of_two_passes(side: Side, change: Callable[[Net], object]) -> None:
    with_passes(side, 2)
    side.backward()
    change(side.net)
    side.optimizer.step()


def enter_changes(
    place: Callable[[Side, Callable[[Net], object]], None],
    changes: dict[str, Callable[[Net], object]],
    *ops: str,
) -> None:
    """Register a case for each change of the network, at the given place of a step."""
    for name, change in changes.items():
        case(*ops, name=f"{name}_{place.__name__}")(partial(place, change=change))


def with_passes(side: Side, passes: int) -> None:
    if not side.is_alone:
        side.optimizer.set_backward_passes_per_step(passes)
