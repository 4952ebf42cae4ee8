"""Check that the Triton sum kernel is bitwise equal to the sums of the host.

Triton's interpreter runs the kernel here, on host tensors. The interpreter truncates instead of
rounding to bfloat16, so ``perf/gpu_check.py`` checks bfloat16 on a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpctrain.comm.ops import Op, combination, combine_to

ROOT = Path(__file__).parents[2]
NUMELS = (1, 7, 1024, 2048, 2049, 10_003)

pytestmark = pytest.mark.requires("triton")


def in_own_process(name: str) -> None:
    """Run a function of this file in a new process, with or without Triton's interpreter."""
    interprets = {"TRITON_INTERPRET": "1"} if name.startswith("interpreted") else {}
    line = [sys.executable, "-c", f"from tests.gpu.test_device_sum import {name}; {name}()"]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environ = os.environ | interprets | {"PYTHONPATH": paths}
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def drawn(numel, dtype, rank):
    source = torch.Generator().manual_seed(1000 * rank + numel)
    values = torch.randn(numel, generator=source) * 10.0 ** torch.randint(-5, 4, (numel,))
    values[::5], values[1::7] = torch.finfo(dtype).tiny / 2, -0.0
    return values.to(dtype)


def interpreted_sums():
    from hpctrain.comm.node.device_sum import slice_sum_of  # noqa: PLC0415 - reads TRITON_INTERPRET

    for dtype in (torch.float32, torch.float16):
        how = combination(dtype, Op.SUM)
        for num_ranks in (2, 4, 8):
            for numel in NUMELS:
                for scale in (None, 1 / num_ranks, 0.3):
                    parts = [drawn(numel, dtype, rank) for rank in range(num_ranks)]
                    expected = torch.empty_like(parts[0])
                    combine_to(expected, [part.clone() for part in parts], how, scale)
                    slice_sum_of(parts, how)(scale)
                    kind = torch.int32 if dtype is torch.float32 else torch.int16
                    for part in parts:
                        assert torch.equal(part.view(kind), expected.view(kind)), (
                            dtype,
                            num_ranks,
                            numel,
                            scale,
                        )


def compiled_kernels():
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from hpctrain.comm.node import device_sum  # noqa: PLC0415

    for capability in (80, 90):
        for dtype in device_sum._TYPES:
            constants = {
                "num_ranks": 4,
                "dtype": device_sum._TYPES[dtype],
                "align": 16,
                "block": device_sum._BLOCK_BYTES // dtype.itemsize,
            }
            signature = {"pointers": "*i64", "numel": "i64", "scale": "fp32"}
            signature |= dict.fromkeys(constants, "constexpr")
            source = ASTSource(device_sum.sum_slices, signature, constants)
            target = GPUTarget("cuda", capability, 32)
            options = {"num_warps": device_sum._NUM_WARPS}
            made = triton.compile(source, target=target, options=options)
            text = made.asm["ptx"]
            wide = [line for line in text.splitlines() if "ld.global.v4.b32" in line]
            stores = [line for line in text.splitlines() if "st.global.v4.b32" in line]
            assert len(wide) >= 4, text
            assert len(stores) >= 4, text
            assert ".ftz" not in text
            assert made.asm["cubin"]


def test_kernel_sums_are_bitwise_equal_to_host_sums():
    in_own_process("interpreted_sums")


def test_kernel_compiles_for_gpus_with_wide_loads_and_stores():
    in_own_process("compiled_kernels")
