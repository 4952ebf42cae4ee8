"""Studies as ``hpctrain study run`` would leave them, with times from a formula and noise."""

from dataclasses import replace

import numpy as np

from hpctrain.core.records import Records
from hpctrain.studies.records import Environment, PointRecord, StudyFacts, StudyFolder
from hpctrain.studies.results import StudyResults

NUM_STEPS = 20
BATCH = 64


def bound(point):
    """Seconds of a step by a model."""
    return 0.07 / point["ranks"]


def facts(**changes):
    return replace(
        StudyFacts(
            name="digits",
            mode="strong",
            repeats=5,
            seed=7,
            warm_up="the first 5 steps",
            target={"accuracy": 0.95},
            factors={"ranks": [1, 2, 4, 8], "codec": ["none", "bf16"]},
            command="hpctrain train digits.toml",
            launcher="mpirun -n {ranks}",
            cores=4,
        ),
        **changes,
    )


def environment(**changes):
    return replace(
        Environment(
            versions={"python": "3.11.2", "torch": "2.13.0", "mpi": "Open MPI 5.0.11"},
            cpu="AMD EPYC 7763",
            cores=4,
            host="login1",
            commit="1a2d1ae",
            topology={"nodes": 2, "ranks_per_node": 4},
            plan={"algorithm": "ring", "rails": 2},
            slurm_job=None,
            pinning={"cores": "0-3", "by": "mpirun --bind-to core"},
        ),
        **changes,
    )


def record(point, repeat, order, **changes):
    """One repeat; steps slow down with every doubling of the ranks."""
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
    )
    return replace(made, **changes)


def records(seen=None, **changes):
    """Every repeat of every point, in random order."""
    asked = seen or facts()
    points = [
        {"ranks": ranks, "codec": codec}
        for codec in asked.factors.get("codec", ["none"])
        for ranks in asked.factors["ranks"]
    ]
    pairs = [(point, repeat) for point in points for repeat in range(asked.repeats)]
    order = np.random.default_rng(asked.seed).permutation(len(pairs))
    return [record(*pairs[place], order=number, **changes) for number, place in enumerate(order)]


def complete(**changes):
    """A study in which nothing is missing."""
    return replace(StudyResults(facts(), environment(), records(), bound=bound), **changes)


def write(results, path):
    """Write a study into a folder."""
    path.mkdir(parents=True, exist_ok=True)
    folder = StudyFolder(path)
    folder.write(folder.study, results.facts)
    if results.environment:
        folder.write(folder.environment, results.environment)
    with Records(folder.points_file()) as file:
        for each in results.records:
            file.append(each.as_dict())
    return path
