"""What a run goes on from fits its model, or every tensor that does not is named."""

import pytest
import torch

from hpctrain.core.errors import CheckpointError
from hpctrain.train.run_state import check_fit


def test_every_tensor_that_does_not_fit_is_listed():
    have = {"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros(1), "ok": torch.ones(1)}
    want = {"a": torch.zeros(3), "b": torch.zeros(2, 3).half(), "ok": torch.ones(1)}
    want["d"] = torch.zeros(())
    with pytest.raises(CheckpointError, match="does not fit the model in 4 tensors") as caught:
        check_fit(have, want)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "a: float32 (2,), float32 (3,) is wanted",
        "b: float32 (2, 3), float16 (2, 3) is wanted",
        "d: missing, float32 () is wanted",
        "c: float32 (1,), nothing of this name is wanted",
    ]
    check_fit(want, want)
