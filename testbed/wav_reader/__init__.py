"""A folder for PYTHONPATH: vLLM's API server reads audios by the package `soundfile`, which is not installed here.

The module of its name below reads WAV files of 16 bits by Python's own `wave`, and nothing else.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
