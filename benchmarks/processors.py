"""What results say of the processor that they come from."""

from __future__ import annotations

from lora_plugins.kernels.processor import AMX_BF16, ARM_BF16, AVX512_BF16, X86_64_V4, Processor


def bfloat16_instructions(processor: Processor) -> str | None:
    """Return the instructions that multiply bfloat16 here, None where the processor only sums float32."""
    if processor.architecture == "x86_64" and processor.has(AMX_BF16):
        return "AMX"
    if processor.architecture == "x86_64" and processor.has(X86_64_V4 | AVX512_BF16):
        return "AVX-512 BF16"
    if processor.architecture == "aarch64" and processor.has(ARM_BF16):
        return "ARM BF16"
    return None
