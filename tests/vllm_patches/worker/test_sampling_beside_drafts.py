"""The cause of a known limit: beside drafts, vLLM's CPU build takes temperature and `top_p` from leftovers of memory.

Fails once vLLM's function returns what the function expands; then take the limit out of `docs/operate/known-limits.md`.
"""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_vllm_drops_the_expanded_values(dtype: torch.dtype) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("a GPU expands in Triton")
    current_platform.import_kernels()
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    leftover, expanded = torch.full((3,), 7, dtype=dtype), torch.full((3,), 7, dtype=torch.int64)
    for output in (leftover, expanded):
        _expand_kernel_impl(output, torch.tensor([2, 3], dtype=dtype), torch.tensor([2, 3]), 0, 1)
    assert expanded.tolist() == [2, 2, 3], "right in the type that the function computes in"
    assert leftover.tolist() == [7, 7, 7]
