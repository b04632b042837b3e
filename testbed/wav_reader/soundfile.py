"""What vLLM calls of the package of this name: see `testbed.wav_reader`."""

from __future__ import annotations

import wave
from typing import Any, BinaryIO, Self


class LibsndfileError(RuntimeError):
    """A file that is no WAV."""

    code = 1


class SoundFile:
    """An opened file."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._wave = wave.open(file)  # noqa: SIM115 - closed by `__exit__`
        except (wave.Error, EOFError) as error:
            raise LibsndfileError(str(error)) from error
        self.samplerate, self.frames = self._wave.getframerate(), self._wave.getnframes()
        self.channels = self._wave.getnchannels()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wave.close()

    def read(self, **_: Any) -> Any:
        import numpy as np

        return np.frombuffer(self._wave.readframes(self.frames), "<i2").astype(np.float32) / 32768


def available_formats() -> dict[str, str]:
    """Those that `mistral_common` names as it is imported."""
    return {"WAV": "WAV (Microsoft)"}
