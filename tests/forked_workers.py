"""A plugin of pytest-xdist: the processes that run tests are forked from one that has imported all tests.

    pytest -p tests.forked_workers -n 4

Each would import the tests with vLLM, Transformers and more for itself, which takes some sixteen seconds of a core. The
process that servers are forked from imports what they need at the same time. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 24 * 3600.0
has_imported = False  # here, or in the process that this one was forked from


def pytest_configure(config: pytest.Config) -> None:
    """Name the run, and begin to import, in the process that distributes tests."""
    if hasattr(config, "workerinput") or not config.getoption("tx", None):
        return
    from testbed import forking_vllm

    os.environ[forking_vllm.RUN] = config.option.testrunuid = config.option.testrunuid or uuid.uuid4().hex
    forking_vllm.start_parent()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[object]) -> None:
    """Have xdist start each process by this file."""
    import execnet

    python = shlex.join([sys.executable, "-P", __file__])
    specs[:] = [
        execnet.XSpec(f"popen//execmodel=main_thread_only//id=gw{number}//python={python}")
        for number in range(len(specs))
    ]


class _NoItems:
    """A plugin that collects modules without what is in them."""

    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def import_tests() -> None:
    """Import all modules of tests as pytest does; what cannot be imported is told by each process that tries again."""
    global has_imported  # noqa: PLW0603 - what tests/conftest.py asks
    has_imported = True
    from testbed import triton_interpreter  # noqa: F401 - before vLLM, as tests/conftest.py does
    from testbed.forking_vllm import import_vllm

    import_vllm()
    os.chdir(ROOT)
    os.environ.pop("PYTEST_ADDOPTS", None)  # of the run, which may write files
    arguments = ["--collect-only", *("-p", "no:cacheprovider"), *("-p", "no:xdist")]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(arguments, [_NoItems()])


def main() -> int:
    """Called as Python is, `-u -c CODE`; ends as the forked process does."""
    sys.path.append(str(ROOT))
    from testbed.forking_vllm import fork_python

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # xdist ends its processes
    return fork_python(sys.argv[-1], "tests.forked_workers:import_tests").wait(LONGEST_S)


if __name__ == "__main__":
    sys.exit(main())
