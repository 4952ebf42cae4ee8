"""Check that the documented table of step states matches the methods."""

import pytest

from hpctrain.gradients.bucket_reducer import StepState

pytestmark = pytest.mark.ranks(1)


def test_table_of_transitions_matches_the_methods():
    rows = [line.split() for line in StepState.__doc__.splitlines() if line.strip()]
    table = {row[0]: row[1:] for row in rows if row[0] in StepState.__members__ and len(row) == 4}
    assert table.keys() == StepState.__members__.keys()
    for name, (filled, _, cleared) in table.items():
        state = StepState[name]
        assert (state.filled().name, state.cleared().name) == (filled, cleared)
        assert state.filled().is_begun
        assert not state.cleared().is_begun
        assert state.cleared().was_reduced == (state.was_reduced or state is StepState.REDUCED)
