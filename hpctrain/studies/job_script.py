"""Batch script that runs the measured command at one size, for a proposal."""

import shlex
from pathlib import Path

from hpctrain.studies.points import SRUN
from hpctrain.studies.study_file import LAUNCH
from hpctrain.studies.study_results import PointSummary, StudyResults

_MARGIN = 1.1  # time limit relative to the expected time


def job_script(results: StudyResults, summary: PointSummary, training_s: float | None) -> str:
    """Return a batch script for Slurm that runs a study's command on the ranks of one point.

    Args:
        results: results of the study.
        summary: the measured point whose nodes, ranks and factors the script uses.
        training_s: expected seconds of the training; None omits the time limit.
    """
    config, record = results.config, summary.records[0]
    folder = Path("runs", config.study.name)
    names = record.names(results.config.mode_of(summary.point), folder)
    launcher, command, variables = config.filled(names)
    if config.command.launcher == LAUNCH:
        launcher = shlex.split(SRUN.format(**names))
    lines = ["#!/bin/bash", f"#SBATCH --job-name={config.study.name}"]
    lines += [f"#SBATCH --nodes={record.layout.nodes}"]
    lines += [f"#SBATCH --ntasks-per-node={record.layout.ranks_per_node}"]
    if training_s is not None:
        minutes = int(_MARGIN * training_s / 60) + 1
        lines.append(f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*lines, shlex.join([*launcher, *command])])
