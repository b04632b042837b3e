"""What the store's own file system answers, as errors of ours."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lora_plugins.errors import LoRAPluginsError, OutOfMemory, SourceUnavailable

# The system's ways of saying that there is no room.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise what is inside, its OSErrors as ours.

    Raises:
        OutOfMemory: the disk is full.
        SourceUnavailable: the store cannot be read or written.
    """
    try:
        yield
    except LoRAPluginsError:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise OutOfMemory(
                f"a full disk below the store ({error.strerror})",
                expected="room for the adapter",
                remedy="free space, or set LORA_PLUGINS_STORE_MAX_BYTES or LORA_PLUGINS_STORE_DIR",
            ) from error
        raise SourceUnavailable(
            f"a store that answers '{error.strerror or type(error).__name__}'",
            expected="a store that can be written",
            remedy="check LORA_PLUGINS_STORE_DIR, its mount and its permissions",
        ) from error
