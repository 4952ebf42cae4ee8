"""Changes of a model's buffers by a forward pass, such as the statistics of BatchNorm."""

import torch
from torch import Tensor, nn


class BufferStates:
    """The buffers of a model at the start of a step, and what each pass makes of them.

    Every pass begins with the buffers of the start of the step; after it, ``take`` returns what
    it has changed and puts them back.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keep copies of all buffers: the only memory that this needs."""
        found: dict[int, tuple[nn.Module, str, Tensor]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                found.setdefault(id(buffer), (module, name, buffer))
        self._places = list(found.values())
        self._start = [buffer.detach().clone() for _, _, buffer in self._places]

    def __len__(self) -> int:
        """Return the number of buffers."""
        return len(self._places)

    def start(self, entry: int) -> Tensor:
        """Return a buffer as it was at the start of the step."""
        return self._start[entry]

    def has_mean(self, entry: int) -> bool:
        """Say whether a buffer can be averaged; integers and truth values cannot."""
        start = self._start[entry]
        return start.is_floating_point() or start.is_complex()

    def take(self) -> list[Tensor | None]:
        """Return copies of the buffers that have changed, None for the others; put all back."""
        changed: list[Tensor | None] = []
        for entry, ((module, name, _), start) in enumerate(
            zip(self._places, self._start, strict=True)
        ):
            now = getattr(module, name).detach()
            # By value: batch_norm changes its statistics without a new version of the tensor.
            is_changed = not torch.equal(now, start)
            changed.append(now.clone() if is_changed else None)
            if is_changed:
                self.put(entry, start)
        return changed

    @torch.no_grad()
    def put_back(self) -> None:
        """Give all buffers what they held at the start of the step."""
        for entry, start in enumerate(self._start):
            self.put(entry, start)

    def put(self, entry: int, value: Tensor) -> None:
        """Give a buffer a value; a pass may have put another tensor into its place."""
        module, name, buffer = self._places[entry]
        buffer.detach().copy_(value)
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)
