"""Check the words of the header message of a step."""

import dataclasses

import pytest

from hpctrain.gradients.step_header import NUM_WORDS, StepMessage, agreement_of, words_of

pytestmark = pytest.mark.ranks(1)

VALUES = {int: 3, float: 0.5, bool: True, str: "layer.weight", int | None: 3}
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
        for number in ("member", "step", "flags"):
            assert found[number] == (3 if number == name else 0)
        assert found["changed_equally"] == (name == "program_changes")
        assert found["num_active"] == size
