"""Objects of the CPU kernels that a wheel brings along: which, whether they may be loaded, and that they are right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lora_plugins.kernels.compiled import build, prebuilt
from lora_plugins.kernels.processor import X86_64_V3, X86_64_V4, Processor, this_processor
from tests.kernels.common import assert_equal, forget_what_was_built, make_case
from tests.repetitions import IS_LONG

ROOT = Path(__file__).parents[2]
V3 = Processor("x86_64", X86_64_V3)
HERE = prebuilt.level("float32", this_processor())
COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)
here = pytest.mark.skipif(HERE is None or COMPILER is None, reason="no object can be made for this processor")


@pytest.mark.parametrize(
    ("processor", "dtype", "name"),
    [
        (V3, "float32", "x86-64-v3"),
        (V3, "bfloat16", "x86-64-v3"),
        (Processor("x86_64", X86_64_V4), "bfloat16", "x86-64-v4"),
        (Processor("x86_64", X86_64_V4 | {"avx512_bf16"}), "bfloat16", "x86-64-v4-bf16"),
        (Processor("x86_64", X86_64_V4 | {"avx512_bf16"}), "float32", "x86-64-v4"),
        (Processor("x86_64", X86_64_V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}), "bfloat16", "x86-64-v4-amx"),
        (Processor("x86_64", X86_64_V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}), "float16", "x86-64-v4"),
        (Processor("x86_64", X86_64_V4 - {"avx512vl"}), "float32", "x86-64-v3"),
        (Processor("x86_64", X86_64_V3 - {"fma"}), "float32", None),
        (Processor("aarch64", frozenset({"asimd"})), "bfloat16", "aarch64"),
        (Processor("aarch64", frozenset({"asimd", "bf16"})), "bfloat16", "aarch64-bf16"),
        (Processor("aarch64", frozenset({"asimd", "bf16"})), "float16", "aarch64"),
        (Processor("ppc64le", X86_64_V4), "float32", None),
    ],
)
def test_the_best_level_that_the_processor_has(processor, dtype, name):
    level = prebuilt.level(dtype, processor)
    assert (level and level.name) == name


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of objects, as a wheel has it, whose only one is for this machine or for V3."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    file = folder / (HERE or prebuilt.level("float32", V3)).file_name("float32")
    file.write_bytes(b"\x7fELF, as built")
    listed = {"source": prebuilt.digest_of_source(), "objects": {file.name: prebuilt.digest_of(file)}}
    (folder / prebuilt.LIST).write_text(json.dumps(listed))
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    return file


def find(processor: Processor | None = None) -> Path | None:
    return prebuilt.find("float32", processor or (this_processor() if HERE else V3))


def test_an_object_as_it_was_built_is_found(installed):
    assert find() == installed


def test_without_a_folder_of_objects_none_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "missing")
    assert prebuilt.find("float32", V3) is None


def test_every_c_file_is_in_the_digest_of_the_source():
    here = prebuilt.SOURCE.parent
    assert {prebuilt.SOURCE.name, *prebuilt.HEADERS} == {file.name for kind in "ch" for file in here.glob(f"*.{kind}")}
    before = prebuilt.digest_of_source()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prebuilt, "HEADERS", prebuilt.HEADERS[:1])
        assert prebuilt.digest_of_source() != before


def test_a_source_tree_has_no_objects():
    assert not prebuilt.FOLDER.exists()


def change(file: Path, how: str) -> None:
    listing = file.parent / prebuilt.LIST
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "missing":
        file.unlink()
    elif how == "another source":
        listing.write_text(json.dumps({**json.loads(listing.read_text()), "source": "0" * 64}))
    elif how == "not listed":
        listing.write_text(json.dumps({**json.loads(listing.read_text()), "objects": {}}))
    elif how == "no list":
        listing.unlink()
    else:
        listing.write_text(how)


CHANGES = {
    "truncated": "is not the file that was built",
    "missing": "cannot be read (FileNotFoundError",
    "another source": "made of another lora.c",
    "not listed": "cannot be read (KeyError",
    "no list": "cannot be read (FileNotFoundError",
    "{nonsense": "cannot be read (JSONDecodeError",
    "[]": "cannot be read (TypeError",
}


@pytest.mark.parametrize(("how", "says"), CHANGES.items(), ids=CHANGES)
def test_what_is_not_as_built_is_never_loaded(installed, how, says):
    change(installed, how)
    with pytest.raises(prebuilt.Unusable) as caught:
        find()
    assert says in str(caught.value)


def test_a_processor_without_a_level_is_named(installed):
    with pytest.raises(prebuilt.Unusable, match=r"this processor \(ppc64le\) has none of the levels x86-64-v4-amx, "):
        find(Processor("ppc64le"))


@pytest.fixture
def fresh():
    forget_what_was_built()
    yield
    forget_what_was_built()


@here
@pytest.mark.usefixtures("fresh")
def test_a_broken_object_is_compiled_instead(installed, logged):
    # Listed as it is, so that loading it is tried.
    assert build.problem() is None
    (said,) = [record.getMessage() for record in logged.records]
    assert said.startswith("CPU kernels: float32: the package's own objects cannot be used: ")
    assert installed.name in said
    assert said.endswith(f"; compiling with {COMPILER}")


@here
@pytest.mark.usefixtures("fresh")
def test_a_foreign_object_is_compiled_instead(installed, logged):
    """A whole library, of another program."""
    subprocess.run([COMPILER, "-shared", "-x", "c", "/dev/null", "-o", installed], check=True, timeout=60)
    listing = installed.parent / prebuilt.LIST
    listed = json.loads(listing.read_text())
    listing.write_text(json.dumps({**listed, "objects": {installed.name: prebuilt.digest_of(installed)}}))
    assert build.problem() is None
    assert "undefined symbol: lora_add; compiling with" in logged.text


@pytest.mark.usefixtures("fresh")
def test_without_an_object_and_a_compiler_both_are_said(installed, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    change(installed, "truncated")
    found = build.problem()
    assert found.startswith(
        "no C compiler is on the PATH (cc, gcc, clang), and the package's own objects cannot be used"
    )


# --- a real wheel ---

WITHOUT_COMPILER = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import lora_plugins, shutil, torch
from lora_plugins.kernels.compiled import build
from tests.kernels.common import assert_equal, make_case
assert lora_plugins.__file__.startswith(sys.argv[1]), lora_plugins.__file__
assert not any(map(shutil.which, build.COMPILERS))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        slot_of_row = [-1, *[1] * 40, 0, 1, -1]
        ranks = [(5, 17), (33, 7)]
        case = make_case(slot_of_row, ranks, inn=515, widths=(70, 33), max_rank=40, dtype=dtype, products="compiled")
        y = case.outputs()
        assert_equal(case.computed(y), case.expected(y), y, slot_of_row)
        assert build.product(str(dtype)[6:]).threads() == threads
    torch.set_num_threads(4)
    large = make_case([0] * 400, [(64,)], inn=1100, widths=(900,), max_rank=64, dtype=dtype, products="compiled")
    assert large.computed(torch.zeros(400, 900, dtype=dtype)).isfinite().all()
print("right")
"""


@here
def test_a_wheel_computes_right_without_a_compiler(tmp_path):
    """Its threads, which libgomp gives stacks of OMP_STACKSIZE, need small ones."""
    levels = {prebuilt.level(dtype, this_processor()).name for dtype in prebuilt.DTYPES}
    if IS_LONG:
        levels.add("x86-64-v4-amx" if this_processor().architecture == "x86_64" else "aarch64-bf16")
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "build_wheel.py", "--no-build-isolation", "--dist", tmp_path / "dist",
         "--levels", *levels],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "REPOSITORY": "https://host/us.git"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    wheel = made.stdout.splitlines()[-1]
    assert wheel.endswith("-py3-none-any.whl")
    target, empty, elsewhere = tmp_path / "target", tmp_path / "empty", tmp_path / "elsewhere"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(target)  # as pip installs a wheel of nothing that needs a place of its own
    (metadata,) = target.glob("*.dist-info/METADATA")
    assert "\nProject-URL: Repository, https://host/us\n" in metadata.read_text()
    shutil.copytree(ROOT / "tests" / "kernels", elsewhere / "tests" / "kernels", ignore=shutil.ignore_patterns("__py*"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, target], cwd=elsewhere,
        env={"PATH": str(empty), "PYTHONPATH": f"{target}{os.pathsep}{elsewhere}", "OMP_STACKSIZE": "64k"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "right"
    for dtype in prebuilt.DTYPES:
        name = prebuilt.level(dtype, this_processor()).file_name(dtype)
        assert f"CPU kernels: {dtype} from {name}, built with the package" in done.stdout


CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


@pytest.mark.nightly
@pytest.mark.skipif(not (CROSS and EMULATOR), reason="needs Debian's gcc-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize(
    ("level", "dtype"),
    [(level, dtype) for level in prebuilt.LEVELS if level.architecture == "aarch64" for dtype in level.dtypes],
    ids=lambda value: getattr(value, "name", value),
)
def test_objects_for_aarch64_are_right_in_an_emulator(tmp_path, level, dtype):
    library, driver = tmp_path / level.file_name(dtype), tmp_path / "driver"
    flags = [*build.ANY_PROCESSOR, *level.compiler_flags, "-nostdlib", f"-DELEMENT={build.ELEMENTS[dtype]}"]
    subprocess.run([CROSS, *flags, prebuilt.SOURCE, "-o", library], check=True, timeout=60)
    source = Path(__file__).with_name("aarch64_driver.c")
    subprocess.run([CROSS, source, library, f"-Wl,-rpath,{tmp_path}", "-o", driver], check=True, timeout=60)
    for rows, inn, rank, width in ((1, 64, 16, 70), (23, 513, 7, 33), (70, 40, 65, 9)):
        kind = getattr(torch, dtype)
        case = make_case([0] * rows, [(rank,)], inn=inn, widths=(width,), max_rank=rank, dtype=kind)
        y = case.outputs()
        sizes = torch.tensor([kind.itemsize, rows, inn, rank, width, 0, 0], dtype=torch.int64)
        parts = (sizes, case.x, case.weights.a[0], case.weights.b[0], y)
        given = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
        done = subprocess.run(
            [EMULATOR, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", driver],
            input=given,
            capture_output=True,
            timeout=120,
            check=True,
        )
        found = torch.frombuffer(bytearray(done.stdout), dtype=kind).view(y.shape)
        assert_equal(found, case.expected(y), y, case.slot_of_row)
