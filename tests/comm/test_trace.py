"""``HPCTRAIN_TRACE=1`` prints a line per collective, and changes nothing else."""

import re

import pytest
import torch

import hpctrain

LINE = re.compile(r"r\d+ \| allreduce_ {7}\| {2}400\.0 KiB \| +[\d.]+ (us|ms|s)\n")


@pytest.mark.ranks(1, 2, 3)
def test_each_collective_prints_rank_operation_size_and_time(monkeypatch, capfd):
    monkeypatch.setenv("HPCTRAIN_TRACE", "1")
    hpctrain.init()
    total = hpctrain.allreduce(torch.ones(102_400), op=hpctrain.Sum)
    hpctrain.barrier()
    rank, size = hpctrain.rank(), hpctrain.size()
    hpctrain.shutdown()
    lines = capfd.readouterr().err.splitlines(keepends=True)
    assert bool((total == size).all())
    assert any(LINE.fullmatch(line) and line.startswith(f"r{rank} ") for line in lines), lines
    assert any(line.startswith(f"r{rank} | barrier ") for line in lines), lines
