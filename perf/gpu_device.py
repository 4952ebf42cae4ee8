"""The device of a rank of ``gpu_check.py``: a CUDA GPU, or a simulated device.

``DEV`` names the device: ``cuda``; ``mcpu``, of the package torch_mcpu in folder ``MCPU_SITE``;
``cpu``. All ranks use the first GPU; with ``CARDS=own`` each rank uses a separate one, if there
are enough.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

KIND = os.environ.get("DEV", "cuda")
if KIND == "mcpu":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    sys.path.insert(0, os.environ["MCPU_SITE"])

import torch  # noqa: E402 - it looks for devices when it is imported
from torch import Tensor, nn  # noqa: E402

if KIND == "mcpu":
    import torch_mcpu  # noqa: F401 - registers the device

CARD = 0
if os.environ.get("CARDS") == "own":
    CARD = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
DEVICE = torch.device(KIND) if KIND == "cpu" else torch.device(KIND, CARD)
_SPIN: list[Tensor] = []


def wait_for_all() -> None:
    """Wait on the host for all operations in the queues of the device."""
    if KIND != "cpu":
        torch.accelerator.synchronize()


def delay(milliseconds: float) -> None:
    """Keep the current stream busy for some milliseconds; the host does not wait."""
    if KIND == "cuda":
        torch.cuda._sleep(int(milliseconds * 1.8e6))  # noqa: SLF001 - cycles of some 1.8 GHz
        return
    if not _SPIN:
        _SPIN.append(torch.eye(256, device=DEVICE))
    for _ in range(int(milliseconds * 2)):
        _SPIN[0].mm(_SPIN[0])


class Late(torch.autograd.Function):
    """Identity that keeps the stream busy in backward, before the next operation."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:  # noqa: ARG004 - torch's own
        """Return the values unchanged."""
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # noqa: ARG004 - torch's own
        """Delay the stream, and return the gradient unchanged."""
        delay(1.0)
        return grad


class LateBackward(nn.Module):
    """Layer with the function ``Late``."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return Late.apply(values)


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise an error if the host would wait for the GPU inside the block."""
    if KIND != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
