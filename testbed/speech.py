"""What the tiny Whisper of `testbed.architectures` hears: two seconds of a tone, its processor, and a WAV file."""

from __future__ import annotations

import io
import string
import wave
from pathlib import Path
from typing import Any

SAMPLES_PER_S = 16_000
_BEGIN = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")


def samples() -> Any:
    """A rising tone in noise, as numbers that a file of 16 bits holds exactly."""
    import numpy as np

    seconds = np.arange(2 * SAMPLES_PER_S) / SAMPLES_PER_S
    noise = np.random.default_rng(0).standard_normal(len(seconds))
    tone = 0.3 * np.sin(2 * np.pi * 440 * seconds * (1 + 0.2 * seconds)) + 0.05 * noise
    return ((tone * 32768).astype(np.int16) / 32768).astype(np.float32)


def wav() -> bytes:
    """`samples` as a file."""
    with wave.open(file := io.BytesIO(), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLES_PER_S)
        writer.writeframes((samples() * 32768).astype("<i2").tobytes())
    return file.getvalue()


def write_processor(base: Path, vocabulary: int) -> None:
    """Of as many words as the model has, each of two letters, but for those that steer Whisper."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    steering = ["<|endoftext|>", *_BEGIN[:1], *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", *_BEGIN[2:3]]
    steering += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", *_BEGIN[3:]]
    pairs = (one + other for one in string.ascii_lowercase for other in string.ascii_lowercase)
    words = {word: number for number, word in zip(range(vocabulary - len(steering)), pairs, strict=False)}
    tokenizer = WhisperTokenizer(vocab=words, merges=[])
    tokenizer.add_special_tokens({"extra_special_tokens": steering})
    assert len(tokenizer) == vocabulary
    WhisperProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=4), tokenizer).save_pretrained(base)


def inputs(base: Path) -> tuple[Any, list[int]]:
    """What the processor makes of the samples, and the tokens that a transcript begins with."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(base)
    heard = processor.feature_extractor(samples(), sampling_rate=SAMPLES_PER_S, return_tensors="pt").input_features
    return heard, processor.tokenizer.convert_tokens_to_ids(list(_BEGIN))


def prompt(beginning: list[int]) -> dict[str, Any]:
    """What vLLM's engine is asked, as its transcriptions ask."""
    audio = {"audio": (samples(), SAMPLES_PER_S)}
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": audio},
        "decoder_prompt": {"prompt_token_ids": beginning},
    }
