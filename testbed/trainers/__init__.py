"""Adapters as trainers write them: each trainer's own names, files and configuration, and what is to become of each.

The writers' code is the source; `TRAINERS` in `table.py` has the file and version of each. `python -m
benchmarks.models.trainers` serves them.
"""
