"""The methods of a distributed optimizer."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from hpctrain.comm.eager import eager
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.bucket_reducer import Reducer
from hpctrain.gradients.sample_count import NUM_FLAGS


class DistributedMethods:
    """What ``DistributedOptimizer`` adds to the optimizer that it is given."""

    _reducer: Reducer | None = None
    """None where there is nobody to average with."""
    _parameter_names: dict[Tensor, str]
    """Of all parameters, the same on every rank."""
    _passes = 1
    _own_flags = 0  # in a world of one
    _is_synchronizing = True
    _was_synchronized = False

    @property
    def communication_seconds(self) -> float:
        """Time in which the last step waited for gradients of other ranks, in seconds."""
        return self._reducer.exposed_seconds if self._reducer else 0.0

    @property
    def backward_passes_per_step(self) -> int:
        """Passes that are added up on each rank before one reduction."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of passes that are added up, from the next backward on.

        Not collective, but every rank calls it, between two steps.

        Raises:
            ConfigError: it is less than 1.
        """
        check_passes(passes)
        self._passes = passes
        if self._reducer:
            self._reducer.passes = passes

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of, from the next backward on.

        With different counts the average gradient is weighted by them, so that it is the mean
        over all samples of the step. Not collective, but every rank calls it, or none does.

        Args:
            num_samples: of this rank in each pass of this step; 0 where it has none and skips
                backward.
            nominal: the usual count, the same on every rank; float16 gradients need it, since
                they are multiplied by ``num_samples / nominal``.

        Raises:
            ConfigError: the count is not valid, changes between the passes of a step, or the
                optimizer sums.
        """
        if self._reducer:
            self._reducer.set_num_samples(num_samples, nominal)

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._reducer.raised_flags if self._reducer else self._own_flags

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits in ``raised_flags`` when a step is over.

        They ride in a message that is sent anyway, in every step until other flags are given.
        Not collective; call it before ``backward``.

        Args:
            flags: bits 0 to 3, such as "somebody asked me to stop".

        Raises:
            ConfigError: there are other bits.
        """
        if not 0 <= flags < 1 << NUM_FLAGS:
            raise ConfigError(f"flags are bits 0 to {NUM_FLAGS - 1}, got {flags:#b}")
        self._own_flags = flags
        if self._reducer:
            self._reducer.raise_flags(flags)

    def synchronize(self) -> None:
        """Average the gradients now, if ``backward()`` has not done so already. Collective.

        Needed only by a rank that skips ``backward``: there it stands in its place, before
        gradients are clipped and before any other collective of the step. Everywhere else it is
        harmless, as is ``skip_synchronize``.
        """
        if self._reducer and not self._reducer.finish():
            self._was_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` inside come after ``synchronize()`` without a warning.

        Gradients are averaged once in any case, and what was changed since stays changed where
        all ranks have changed it alike.
        """
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = True

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget the gradients; see ``torch.optim.Optimizer.zero_grad``.

        Harmless at any time: no gradient is on its way when ``backward()`` has returned.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if self._reducer:
            self._reducer.new_step()

    def add_param_group(self, param_group: Any) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``. All ranks do."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._reducer:
            self._reducer.hook()

    def load_state_dict(self, state_dict: Any) -> None:
        """Replace the state; see ``torch.optim.Optimizer.load_state_dict``.

        What a backward that raised has left behind is forgotten.
        """
        if self._reducer:
            self._reducer.start_again()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy would step on gradients that nobody averages."""
        raise ConfigError(
            "a distributed optimizer cannot be copied or pickled; keep its state_dict(), and wrap "
            "an optimizer of the copied model"
        )


@eager
def before_step(
    stepping: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Average what is not averaged yet: torch calls this at the start of ``step()``.

    A closure among the arguments, which makes gradients inside, has them averaged, too.
    """
    if stepping._was_synchronized and stepping._is_synchronizing:  # noqa: SLF001
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() after "
            "optimizer.synchronize(); it changes nothing here, since gradients are averaged once, "
            "when backward() returns: leave synchronize() out",
            stacklevel=3,
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        stepping._reducer.finish()  # noqa: SLF001
        return args, kwargs

    def averaging() -> Any:
        loss = closure()
        stepping._reducer.finish()  # noqa: SLF001
        return loss

    return args[:1], kwargs | {"closure": averaging}


@eager
def after_step(stepped: Any, *_: object) -> None:
    """Expect the next step: torch calls this at the end of ``step()``."""
    stepped._was_synchronized = False  # noqa: SLF001
    stepped._reducer.end_step()  # noqa: SLF001


def check_passes(passes: int) -> None:
    """Raise ``ConfigError`` unless there is at least one pass in a step."""
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step must be > 0, got {passes}")
