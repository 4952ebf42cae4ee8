"""A complete study satisfies every rule; each removal violates the rule that needs the data."""

from dataclasses import replace

import pytest

from hpctrain.studies.checklist import verdicts
from tests.studies import generated


def broken(results):
    """Return the names of violated rules."""
    return {verdict.name for verdict in verdicts(results) if verdict.fault}


def with_records(**changes):
    return generated.complete(records=generated.records(**changes))


def with_one(place=0, **changes):
    """Return a study with one changed record."""
    records = generated.records()
    records[place] = replace(records[place], **changes)
    return generated.complete(records=records)


def asking(**changes):
    return generated.complete(config=generated.config(**changes))


def with_environment(**changes):
    return generated.complete(environment=generated.environment(**changes))


def of_points(keep):
    """Return a study planned with only the points for which ``keep`` is true."""
    records = [each for each in generated.records() if keep(each.point)]
    ranks = sorted({each.point["ranks"] for each in records})
    factors = {"ranks": ranks, "codec": ["none", "bf16"]}
    return generated.complete(config=generated.config(factors), records=records)


def consecutive():
    records = sorted(generated.records(), key=lambda each: (str(each.point), each.repeat))
    return generated.complete(
        records=[replace(each, order=order) for order, each in enumerate(records)]
    )


def with_growing_batch():
    records = [
        replace(each, samples=each.samples * each.point["ranks"]) for each in generated.records()
    ]
    return generated.complete(records=records)


def test_a_complete_study_satisfies_every_rule():
    results = generated.complete()
    assert broken(results) == set()
    assert len(verdicts(results)) == 16
    assert not any(verdict.advice for verdict in verdicts(results))


FAILED = {"status": "failed", "step_s": [], "num_steps": 0}

REMOVED = {
    "base": (
        lambda: of_points(lambda point: point["ranks"] > 1),
        "smallest measured point has 2 ranks",
    ),
    "complete": (
        lambda: asking(repeats=6),
        "8 of 48 repeats have neither",
    ),
    "batch": (with_growing_batch, "all ranks processed 64 samples in a step, and 512"),
    "rates": (lambda: with_one(samples=0), "no samples or seconds: repeat"),
    "repeats": (
        lambda: with_one(place=3, **FAILED, error="exit code 1"),
        "4 at ranks",
    ),
    "interleaved": (consecutive, "one after the other"),
    "steps": (lambda: with_one(step_s=[0.1]), "not every step was recorded: repeat"),
    "quiet": (lambda: with_records(other_cores=2.0), "other processes used 2.0 of 4 cores"),
    "setup": (lambda: with_environment(plan=None), "not recorded: plan"),
    "bytes": (lambda: with_records(rail_bytes=None), "no node_bytes, rail_bytes: repeat"),
    "warm_up": (lambda: with_records(warm_up_steps=0), "and 39 more"),
    "bound": (lambda: generated.complete(bound=None), "no model of the machine"),
    "parts": (lambda: with_records(idle_s=None), "idle_s: repeat"),
    "cores": (
        lambda: with_records(oversubscribed=False),
        "has more ranks than cores, but is not marked",
    ),
    "target": (lambda: asking(target={}), "the study has no target"),
    "input": (lambda: with_records(input_s=None), "no input_s"),
}


@pytest.mark.parametrize("name", [verdict.name for verdict in verdicts(generated.complete())])
def test_removed_data_violate_their_rule_with_reason_and_remedy(name):
    remove, reason = REMOVED[name]
    results = remove()
    [verdict] = [each for each in verdicts(results) if each.name == name]
    assert reason in verdict.fault
    assert verdict.advice.endswith(f"; {verdict.remedy}")
    # Missing data of one record may also violate a related rule, and no other rule.
    also = {"batch": {"rates"}, "rates": {"batch"}, "steps": {"batch"}}.get(name, set())
    assert broken(results) - also == {name}


@pytest.mark.parametrize(
    ("results", "name", "reason"),
    [
        (with_one(**FAILED, error=None), "complete", "no reason: repeat"),
        (generated.complete(environment=None), "setup", "environment.json is missing"),
        (with_environment(commit="1a2d1ae+"), "setup", "changes beyond the commit"),
        (with_environment(commit=None, versions={}), "setup", "not recorded: versions"),
        (with_records(time_to_target_s=None), "target", "not reached: repeat"),
        (
            of_points(lambda point: point["ranks"] in (1, 8)),
            "cores",
            "with a core for each rank is 1",
        ),
    ],
)
def test_other_violations_of_a_rule_are_reported(results, name, reason):
    [verdict] = [each for each in verdicts(results) if each.name == name]
    assert reason in verdict.fault


@pytest.mark.parametrize(
    ("results", "name", "remedy"),
    [
        (with_environment(commit="1a2d1ae+"), "setup", "commit them, and measure again"),
        (with_environment(commit=None, mpi=None, plan=None), "setup", "let hpctrain study run"),
        (with_one(**FAILED, error="exit code 1"), "repeats", "study run --retry-failed"),
        (asking(repeats=4), "repeats", None),
        (with_records(time_to_target_s=None), "target", "train longer, or state a lower"),
        (generated.complete(records=[]), "parts", "measure points with hpctrain study run"),
        (with_records(input_s=None), "input", "hpctrain train does not record"),
    ],
)
def test_the_remedy_fits_the_study(results, name, remedy):
    [verdict] = [each for each in verdicts(results) if each.name == name]
    assert (remedy in verdict.advice) if remedy else not verdict.advice
    assert "commit" not in verdict.advice or "changes beyond the commit" in verdict.fault


def test_weak_scaling_needs_a_constant_batch_per_rank():
    records = [
        replace(each, samples=each.samples * each.point["ranks"]) for each in generated.records()
    ]
    results = generated.complete(config=generated.config(mode="weak"), records=records)
    assert broken(results) == set()
    assert broken(generated.complete(config=generated.config(mode="weak"))) == {"batch"}


def test_a_study_with_failures_only_violates_every_rule_about_measurements():
    results = with_records(**FAILED, error="exit code 1")
    assert broken(results) == REMOVED.keys() - {"complete", "setup", "bound"}
    assert broken(generated.complete(records=[])) == REMOVED.keys() - {"setup", "bound"}
