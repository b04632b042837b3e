"""`vllm serve` in a process that had imported vLLM before the reader of audios was on its path."""

from __future__ import annotations


def main() -> None:
    """Serve as vLLM's command line does; `sys.path` has the folder of `wav_reader`."""
    import soundfile
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.multimodal.media import audio

    audio.soundfile = soundfile
    vllm_main()
