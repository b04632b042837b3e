"""From how many rows of an adapter on PyTorch's products are faster than the compiled product; pure.

PyTorch hands bfloat16 to oneDNN, which multiplies with the processor's own instructions where there are any. The
compiled product sums in float32 registers, or with AVX-512 BF16. Where the processor has neither AMX nor bfloat16
instructions, PyTorch's products of bfloat16 were 4 to 120 times slower than ours at every number of rows.

Sources: `benchmarks/kernels_rows.py` for processors with AVX2 (results/kernels_rows.json). With AMX: measured by the
engine's owner on one machine in November 2026, slower than oneDNN from about 16 rows for each adapter; without a raw
result. AVX-512 BF16 and ARM BF16: not measured; the number of rows is the package's first value.
"""

from __future__ import annotations

from lora_plugins.kernels.processor import Processor, this_processor

ROWS_OF_BFLOAT16 = {"AMX": 16, "AVX-512 BF16": 32, "ARM BF16": 32}


def torch_from_rows(dtype: str, processor: Processor | None = None) -> int | None:
    """Return the number of rows from which PyTorch computes an adapter; None means never.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        processor: this machine's by default.
    """
    if dtype != "bfloat16":
        return None
    instructions = (processor or this_processor()).bfloat16
    return None if instructions is None else ROWS_OF_BFLOAT16[instructions]
