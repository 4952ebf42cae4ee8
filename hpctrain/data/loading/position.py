"""Position of a training in its data, as checkpoints keep it."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from hpctrain.core.errors import DataError
from hpctrain.data.order.ordering import Ordering
from hpctrain.data.order.window import WindowShape
from hpctrain.data.samples import Samples

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A point on the line of all samples of all epochs.

    Nothing in it depends on the number of ranks or on the global batch.
    """

    uuid: str
    """Of the data set."""
    seed: int
    epoch: int
    consumed: int
    """Samples of the epoch that were delivered or left out, of all ranks together."""
    ordering: Ordering
    skipped: tuple[tuple[int, int], ...]
    """Ranges of samples that cannot be read and are left out."""

    def record(self) -> dict[str, Any]:
        """Return what ``of`` reads: numbers, texts and lists of them, fit for JSON."""
        shape = self.ordering.shape
        sizes = asdict(shape) if shape else dict.fromkeys(("block", "window", "lanes"))
        return {
            "format": FORMAT,
            "uuid": self.uuid,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "order": self.ordering.name,
            **sizes,
            "skipped": [list(some) for some in self.skipped],
        }

    @classmethod
    def of(cls, record: dict[str, Any], dataset: Samples) -> Self:
        """Read a record, for the data set that it was made with.

        Raises:
            DataError: it is none, of a later hpctrain, or of other data.
        """
        if record.get("format", 0) != FORMAT:
            raise DataError(
                f"the state of a loader has format {FORMAT}, got {record.get('format')!r}; "
                f"it was saved by another version of hpctrain, or is not of a loader"
            )
        try:
            position = cls._of(record)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"this is not the state of a loader: {error!r}; give what state_dict() returned"
            ) from error
        if position.uuid != dataset.uuid:
            raise DataError(
                f"the state was saved with the data set {position.uuid}, this one is "
                f"{dataset.uuid}; give the same data set, or begin without the state"
            )
        if position.epoch < 0 or not 0 <= position.consumed <= len(dataset):
            raise DataError(
                f"a position is an epoch and 0 to {len(dataset)} samples, got epoch "
                f"{position.epoch} and {position.consumed} samples; the state was changed"
            )
        return position

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Self:
        name, shape = record["order"], None
        if name == "window":
            shape = WindowShape(**{key: int(record[key]) for key in ("block", "window", "lanes")})
        elif name not in ("global", "sequential"):
            raise ValueError(f"no order {name!r}")
        return cls(
            uuid=str(record["uuid"]),
            seed=int(record["seed"]),
            epoch=int(record["epoch"]),
            consumed=int(record["consumed"]),
            ordering=Ordering(name=name, shape=shape),
            skipped=tuple((int(start), int(stop)) for start, stop in record["skipped"]),
        )
