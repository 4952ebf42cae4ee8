"""Each code block of the guide runs separately on four ranks, with classes of earlier blocks."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

import hpctrain

TEXT = (Path(hpctrain.__file__).parent / "guide/parallel-script.md").read_text()


@pytest.mark.ranks(4)
def test_each_snippet_of_the_guide_runs_separately():
    classes = {}
    for number, code in enumerate(
        re.findall(r"^```py\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    ):
        names = {"__name__": "guide", **classes}
        exec(compile(code, f"guide parallel, block {number}", "exec"), names)
        classes |= {name: each for name, each in names.items() if name == "Layer"}
    assert classes
    dist.destroy_process_group()
    hpctrain.shutdown()
