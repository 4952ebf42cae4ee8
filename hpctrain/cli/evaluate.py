"""``hpctrain evaluate`` and ``hpctrain predict``: use what a run has learnt."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import AsJson, RunFolder, option
from hpctrain.core.errors import ConfigError
from hpctrain.core.paths import absolute

if TYPE_CHECKING:
    from hpctrain.train.task import Task

Which = Annotated[
    str, option("WHICH", "last, best (of those that are kept), or its step.", "--checkpoint")
]
Split = Annotated[
    str, option("test|train|validation", "Samples: validation is what data.validation holds out.")
]
Overrides = Annotated[
    list[str] | None, option("KEY=VALUE", "Replace a value of the run's configuration.", "--set")
]


def evaluate(
    run: RunFolder,
    *,
    checkpoint: Which = "last",
    split: Split = "test",
    overrides: Overrides = None,
    json: AsJson = False,
) -> None:
    """Test what a run has learnt, on all ranks that were started together; trains nothing.

    The model is the one that the run's own tests judge: with averaged weights, where train.ema
    is set. Nothing is written.

    For instance:

      hpctrain evaluate runs/digits

      hpctrain evaluate runs/digits --checkpoint best --set 'test.metric=["accuracy", "f1"]'

      hpctrain launch -n 4 hpctrain evaluate runs/digits --set data.args.folder=other-data
    """
    task, source = _built(run, checkpoint, split, overrides)
    from hpctrain.train.evaluation import evaluate as judged  # noqa: PLC0415

    scores = judged(task)
    if task.comm.rank:
        return
    if json:
        typer.echo(dumps({"checkpoint": str(source), "split": split, **asdict(scores)}))
        return
    typer.echo(f"{source}: {scores.num_samples} samples of {split}, loss {scores.loss:.4f}")
    typer.echo("\n".join(scores.lines(task.metric_name)))


def predict(
    run: RunFolder,
    *,
    output: Annotated[Path, option("FILE.h5", "What is written.")],
    checkpoint: Which = "last",
    split: Split = "test",
    overrides: Overrides = None,
) -> None:
    """Write the model's output for every sample, in their order, on any number of ranks.

    FILE.h5 has one data set, output, whose row i is of sample i. It appears whole or not at all,
    and a file that is there stays. All ranks must see its folder.

    For instance:

      hpctrain predict runs/digits --output predictions.h5

      hpctrain launch -n 4 hpctrain predict runs/digits --output all.h5 --split train
    """
    file = absolute(output)  # now: modules of the run may change the directory
    task, source = _built(run, checkpoint, split, overrides)
    from hpctrain.train.predict import predict as written  # noqa: PLC0415

    shape = written(task, file, {"run": str(run), "checkpoint": source.name, "split": split})
    if task.comm.rank == 0:
        typer.echo(f"{output}: output {shape} of {source}")


def _built(
    run: Path, checkpoint: str, split: str, overrides: list[str] | None
) -> "tuple[Task, Path]":
    if split not in {"test", "train", "validation"}:
        raise ConfigError(f"--split must be test, train or validation, got {split!r}")
    from hpctrain.cli.shared_work import joined  # noqa: PLC0415
    from hpctrain.train.predict import load_task  # noqa: PLC0415

    return load_task(run, joined(), overrides=overrides or (), which=checkpoint, split=split)
