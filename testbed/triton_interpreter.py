"""Makes this process run Triton kernels in Triton's interpreter; imported before anything imports Triton.

Triton decides when it makes a kernel, its own library included. The variable is gone again afterwards, so that servers
started from tests do not inherit it.
"""

from __future__ import annotations

import os
import sys


def interpret() -> bool:
    """Switch to the interpreter; False where Triton is not installed."""
    was = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        if "triton" in sys.modules:
            raise RuntimeError("Triton was imported before its interpreter was asked for")
        import triton
        import triton.language
    except ImportError:
        return False
    else:
        triton.knobs.runtime.interpret = True
        return True
    finally:
        if was is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = was


HAS_TRITON = interpret()
