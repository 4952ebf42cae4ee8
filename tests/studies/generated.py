"""Studies as written by ``hpctrain study run``, with times from a formula and noise."""

from dataclasses import asdict, replace

import numpy as np

from hpctrain.core.keys import render
from hpctrain.core.records import Records
from hpctrain.studies.point_records import PointRecord, StudyFolder
from hpctrain.studies.study_file import CommandTable, StudyConfig, StudyTable
from hpctrain.studies.study_results import StudyResults

NUM_STEPS = 20
BATCH = 64


def bound(point):
    """Return the modelled seconds per step."""
    return 0.07 / point["ranks"]


FACTORS = {"ranks": [1, 2, 4, 8], "codec": ["none", "bf16"]}


def config(factors=None, **changes):
    """Return the configuration of a study; ``changes`` are keys of [study]."""
    table = {
        "name": "digits",
        "mode": "strong",
        "repeats": 5,
        "seed": 7,
        "warm_up": 5,
        "target": {"accuracy": 0.95},
        "cores": 4,
        **changes,
    }
    factors = factors or FACTORS
    codec = " --set sync.compression={codec}" if "codec" in factors else ""
    batch = " --set train.global_batch={global_batch}" if "batch" in factors else ""
    run = f"hpctrain train digits.toml{codec}{batch}"
    command = CommandTable(run=run, launcher="mpirun -n {ranks}")
    return StudyConfig(factors=factors, study=StudyTable(**table), command=command)


def environment(**changes):
    return {
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "mpi": "Open MPI 5.0.11",
        "cpu": "AMD EPYC 7763",
        "cores": 4,
        "host": "login1",
        "commit": "1a2d1ae",
        "topology": {"nodes": 2, "ranks_per_node": 4},
        "plan": {"algorithm": "ring", "rails": 2},
        "slurm_job": None,
        "pinning": {"cores": "0-3", "by": "mpirun --bind-to core"},
        **changes,
    }


def record(point, repeat, order, **changes):
    """Return the record of one repeat; communication grows with the logarithm of the ranks."""
    noise = np.random.default_rng([order, repeat])
    ranks = point["ranks"]
    compute = 0.08 / ranks * noise.lognormal(0, 0.02, NUM_STEPS)
    rate = 1e-3 if point.get("codec") == "bf16" else 2e-3
    communication = rate * np.log2(2 * ranks) * noise.lognormal(0, 0.1, NUM_STEPS)
    steps = compute + communication + 0.001
    seconds = float(steps.sum())
    made = PointRecord(
        point=point,
        repeat=repeat,
        order=order,
        status="done",
        oversubscribed=ranks > 4,
        started="2026-11-25T02:14:44Z",
        folder=f"attempts/{order}",
        num_steps=NUM_STEPS,
        elapsed_s=1.2 * seconds,
        warm_up_steps=5,
        step_s=steps.tolist(),
        samples=BATCH * NUM_STEPS,
        seconds=seconds,
        compute_s=compute.tolist(),
        communication_s=communication.tolist(),
        input_s=[0.0007] * NUM_STEPS,
        idle_s=[0.0003] * NUM_STEPS,
        node_bytes=4e6 * (ranks - 1),
        rail_bytes=1e6 * max(ranks - 4, 0),
        loss=0.2 + 0.01 * noise.standard_normal(),
        metric=0.96 + 0.005 * noise.standard_normal(),
        metric_name="accuracy",
        time_to_target_s=1.1 * seconds,
        steps_to_target=NUM_STEPS,
        load=1.5,
        other_cores=0.1,
        machine_cores=4,
        mhz=2450.0,
    )
    return replace(made, **changes)


def records(asked=None, **changes):
    """Return the records of every repeat of every point, in random order."""
    asked = asked or config()
    points = [
        {"ranks": ranks, "codec": codec}
        for codec in asked.factors.get("codec", ["none"])
        for ranks in asked.factors["ranks"]
    ]
    repeats = range(asked.study.repeats)
    pairs = [(point, repeat) for point in points for repeat in repeats]
    order = np.random.default_rng(asked.study.seed).permutation(len(pairs))
    return [record(*pairs[place], order=number, **changes) for number, place in enumerate(order)]


def complete(**changes):
    """Return a study that lacks nothing."""
    return replace(StudyResults(config(), environment(), records(), bound=bound), **changes)


def write(results, path):
    """Write a study to a folder."""
    path.mkdir(parents=True, exist_ok=True)
    folder = StudyFolder(path)
    folder.write(folder.file, render(results.config))
    if results.environment:
        folder.write(folder.environment, results.environment)
    for each in results.records:
        with Records(folder.points_file(each.repeat)) as file:
            file.append(asdict(each))
    return path
