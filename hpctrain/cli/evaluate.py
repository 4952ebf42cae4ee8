"""``hpctrain evaluate`` and ``hpctrain predict``: use the model of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpctrain.cli.options import AsJson, Overrides, RunFolder, option, show_json
from hpctrain.core import paths
from hpctrain.runtime import tool_ranks
from hpctrain.train import evaluation
from hpctrain.train import predict as prediction

if TYPE_CHECKING:
    from hpctrain.train.task import Task

Which = Annotated[
    str,
    option(..., "WHICH", "last, best (of the checkpoints that exist), or a step.", "--checkpoint"),
]
Split = Annotated[
    Literal["test", "train", "validation"],
    option(
        ...,
        "test|train|validation",
        "Samples; validation: the samples held out by data.validation.",
    ),
]

app = typer.Typer()


@app.command()
def evaluate(
    run: RunFolder,
    *,
    checkpoint: Which = "last",
    split: Split = "test",
    overrides: Overrides = None,
    json: AsJson = False,
) -> None:
    """Test the model of a run, on all ranks of the launch.

    The command uses the same model as the tests during the run, which has averaged weights if
    train.ema is set. The command trains nothing and writes no file.

    Examples:
      hpctrain evaluate runs/digits

      hpctrain evaluate runs/digits --checkpoint best --set 'test.metric=["accuracy", "f1"]'

      hpctrain launch -n 4 hpctrain evaluate runs/digits --set data.args.folder=other-data
    """
    task, source = _built(run, checkpoint, split, overrides)
    scores = evaluation.evaluate(task)
    if task.comm.rank:
        return
    if json:
        show_json({"checkpoint": str(source), "split": split, **asdict(scores)})
        return
    typer.echo(f"{source}: {scores.num_samples} samples of {split}, loss {scores.loss:.4f}")
    typer.echo("\n".join(scores.lines(task.metric_name)))


@app.command()
def predict(
    run: RunFolder,
    *,
    output: Path = option(..., "FILE.h5", "File to write; it must not exist."),
    checkpoint: Which = "last",
    split: Split = "test",
    overrides: Overrides = None,
) -> None:
    """Write the model's output for every sample into an HDF5 file.

    FILE.h5 contains one dataset with the name output. Row i belongs to sample i, on any number of
    ranks. The file is created atomically. All ranks must have access to its directory.

    Examples:
      hpctrain predict runs/digits --output predictions.h5

      hpctrain launch -n 4 hpctrain predict runs/digits --output all.h5 --split train
    """
    file = paths.absolute(output)  # modules of the run may change the current directory
    task, source = _built(run, checkpoint, split, overrides)
    facts = {"run": str(run), "checkpoint": source.name, "split": split}
    shape = prediction.predict(task, file, facts)
    if task.comm.rank == 0:
        typer.echo(f"{output}: output {shape} of {source}")


def _built(
    run: Path, checkpoint: str, split: str, overrides: list[str] | None
) -> "tuple[Task, Path]":
    comm = tool_ranks.join()
    return prediction.load_task(
        run, comm, overrides=overrides or (), which=checkpoint, split=split
    )
