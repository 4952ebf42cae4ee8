"""Check the words of the header message of a step."""

import dataclasses
import random

import numpy as np
import pytest

from hpctrain.gradients.step_header import (
    NUM_WORDS,
    StepHeader,
    StepMessage,
    WeightFacts,
    agreement_of,
    words_of,
)

pytestmark = pytest.mark.ranks(1)

NUMBER = (1 << 19) + 3  # both halves of its square are sent
VALUES = {int: NUMBER, float: 0.5, bool: True, str: "layer.weight", int | None: NUMBER}
BY_SUMS = {"weight", "loss"}  # both fields use one word: the loss is weighted


def changed_messages():
    """Yield the name of each field, and a message in which only this field is changed."""
    empty = StepMessage()
    for place, record in enumerate(empty):
        for field in dataclasses.fields(record):
            if field.name == "unreached_names":  # compared by a checksum
                continue
            value = not field.default if field.type is bool else VALUES[field.type]
            records = [*empty]
            records[place] = dataclasses.replace(record, **{field.name: value})
            yield field.name, StepMessage(*records)


def test_each_field_of_a_step_has_separate_words_and_each_word_a_field():
    empty, owner = words_of(StepMessage()), {}
    for name, message in changed_messages():
        words = words_of(message)
        assert len(words) == NUM_WORDS
        places = [i for i, pair in enumerate(zip(words, empty, strict=True)) if len({*pair}) > 1]
        assert places, f"{name} is not sent"
        for place in places:
            assert owner.setdefault(place, name) == name or {owner[place], name} == BY_SUMS
    counts = {place for place in range(NUM_WORDS) if words_of(StepMessage())[place] == 1.0}
    assert {*range(NUM_WORDS)} - {*owner} - counts <= {0, NUM_WORDS - 2, NUM_WORDS - 1}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000])
def test_agreement_contains_exactly_the_reports_of_all_ranks(size):
    for name, message in changed_messages():
        sums = [size * word for word in words_of(message)]
        agreement, _ = agreement_of(sums, size)
        found = agreement._asdict() | agreement.sharded._asdict()
        for fact in ("outdated", "new_sparse", *agreement.sharded._fields):
            assert found[fact] == (fact == name)
        for number in ("member", "step"):
            assert found[number] == (NUMBER if number == name else 0)
        assert found["flags"] == (3 if name == "flags" else 0)
        assert found["changed_equally"] == (name == "program_changes")
        assert found["num_active"] == size


@pytest.mark.parametrize("seed", range(40))
def test_values_of_up_to_a_million_ranks_are_compared_exactly(seed):
    source = random.Random(seed)
    num = source.choice([1, 1, 2, 3])
    values = source.sample([2**20 - 1 - source.randrange(9), *range(5), 2**19, 999_983], num)
    size = source.choice([3, 9999, 16_383, 2**20, source.randrange(3, 2**20)])
    rare = [source.choice([1, size // num]) for _ in values[1:]]
    counts = [size - sum(rare), *rare]
    rows = [words_of(StepMessage(weights=WeightFacts(weights=value))) for value in values]
    # In order of the ranks, each partial sum is rounded to float64, as in a reduction.
    sums = [np.repeat(word, counts).cumsum()[-1] for word in np.array(rows).T]
    agreement, _ = agreement_of(sums, size)
    assert agreement.num_active == size
    assert agreement.weights.differ == (num > 1)


@pytest.mark.limit(600)
@pytest.mark.parametrize("num_steps", [50, pytest.param(10_000, marks=pytest.mark.conformance)])
def test_in_many_steps_of_16383_ranks_only_true_differences_are_found(num_steps):
    size, source = 16_383, random.Random(num_steps)
    for step in range(num_steps):
        header = StepHeader(member=source.randrange(9), step=step, skipped=source.getrandbits(32))
        facts = {name: source.getrandbits(32) for name in ("weights", "first", "unreached")}
        row = np.array(words_of(StepMessage(header, weights=WeightFacts(**facts))))
        sums, used = np.zeros(NUM_WORDS), row.nonzero()
        sums[used] = np.repeat(row[used][:, None], size, axis=1).cumsum(axis=1)[:, -1]
        agreement, fault = agreement_of(sums, size)
        assert not fault, step
        assert agreement.step == step
        assert not agreement.weights.differ
        assert not agreement.weights.unreached_differ
        name = source.choice([*facts])
        facts[name] ^= 1 << source.randrange(20)
        other = np.array(words_of(StepMessage(header, weights=WeightFacts(**facts))))
        weights = agreement_of(sums - row + other, size)[0].weights
        found = weights.differ, not weights.first_is_equal, weights.unreached_differ
        assert found == (name == "weights", name == "first", name == "unreached")
