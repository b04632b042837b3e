"""vLLM's classes as they were, after a test that has patched them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_back(*kinds: type) -> Iterator[None]:
    """Have these classes their own attributes again at the end, and no others."""
    before = [dict(vars(kind)) for kind in kinds]
    yield
    for kind, attributes in zip(kinds, before, strict=True):
        for name in set(vars(kind)) - attributes.keys():
            delattr(kind, name)
        for name, value in attributes.items():
            if vars(kind)[name] is not value:
                setattr(kind, name, value)
