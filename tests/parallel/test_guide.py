"""What the guide shows runs on as many ranks as it says."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

import hpctrain

TEXT = (Path(hpctrain.__file__).parent / "guide/parallel.md").read_text()


@pytest.mark.ranks(4)
def test_the_snippets_of_the_guide_run_from_top_to_bottom():
    names = {"__name__": "guide"}
    for number, code in enumerate(
        re.findall(r"^```py\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    ):
        exec(compile(code, f"guide parallel, block {number}", "exec"), names)
    dist.destroy_process_group()
    hpctrain.shutdown()
