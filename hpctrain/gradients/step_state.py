"""``StepState``: state of the gradients of the current step in a reducer."""

from enum import Enum, auto


class StepState(Enum):
    """State of the gradients of the current step in a reducer.

    =========== ============ ========== =============
    from        backward()   reduction  zero_grad()
    =========== ============ ========== =============
    EMPTY       FILLING      REDUCED    EMPTY
    FILLING     FILLING      REDUCED    EMPTY
    REDUCED     REFILLING    REDUCED    CLEARED
    REFILLING   REFILLING    REDUCED    CLEARED
    CLEARED     REFILLING    REDUCED    CLEARED
    =========== ============ ========== =============

    The end of a step, ``load_state_dict`` and a change of the ranks lead to EMPTY.
    """

    EMPTY = auto()  # there are no gradients of this step
    FILLING = auto()  # backward computes gradients, or a reduction without a backward has begun
    REDUCED = auto()  # all ranks have the sum or average
    REFILLING = auto()  # as FILLING, in a step that was REDUCED before
    CLEARED = auto()  # as EMPTY, in a step that was REDUCED before

    def filled(self) -> "StepState":
        """Return the state after backward has begun."""
        return FILLING if self in {EMPTY, FILLING} else StepState.REFILLING

    def cleared(self) -> "StepState":
        """Return the state after ``zero_grad()``."""
        return EMPTY if self in {EMPTY, FILLING} else StepState.CLEARED

    @property
    def is_begun(self) -> bool:
        """Whether there are gradients of this step."""
        return self not in {EMPTY, StepState.CLEARED}

    @property
    def was_reduced(self) -> bool:
        """Whether gradients were reduced in this step and may have changed since."""
        return self in {StepState.REFILLING, StepState.CLEARED}


EMPTY, FILLING = StepState.EMPTY, StepState.FILLING
