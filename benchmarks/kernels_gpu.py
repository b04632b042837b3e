"""Our Triton kernels, vLLM's, and the memory floor, on one GPU in one call.

Where there is a network, once, with vLLM 0.33's unpacked sources (its Python files suffice):

    python -m benchmarks.kernels_gpu --prepare SOURCES        # fills .cache/gpu, which git ignores

On the machine with the GPU (Python 3.12, torch 2.11, Triton 3.6, no network), with .cache/gpu beside the checkout:

    OUT=results python -m benchmarks.kernels_gpu --seconds 420

writes kernels_gpu.json under $OUT (or benchmarks/results): correctness against float64 first, and only then times, in
a CUDA graph and eager, ours and vLLM's in turn. Cases come in order of what matters; those that the seconds do not
suffice for are counted. `--check` ends after correctness; `--table FILE` takes another tuning table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import gpu_cases
from benchmarks.gpu_cases import Case
from benchmarks.record import RESULTS, circumstances

CARRIED = Path(__file__).resolve().parent.parent / ".cache" / "gpu"
ROUNDS = 5
GRAPH_CALLS = 8  # at least this many calls in one graph
MEMORY_BUDGET_BYTES = 24 << 30
EAGER_ROWS = (1, 64, 2048)  # eager times are the host's; a few sizes show them


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.prepare:
        prepare(options.prepare)
        return 0
    started = time.monotonic()
    sys.path.insert(0, str(CARRIED))
    import torch

    from lora_plugins.kernels import tuning
    from lora_plugins.kernels.triton_ops import operators

    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    table = tuning.read_table(options.table) if options.table else tuning.load_table(f"sm_{major}{minor}")
    made = operators.Operators(table)
    operators.use(made)
    result: dict[str, Any] = {**circumstances(), **_device(torch), "table": Path(table.origin).name}
    print(f"{result['gpu']}, torch {torch.__version__}, table {result['table']}", flush=True)

    result["correctness"], right = correctness(made, device)
    if not right or options.check:
        return _write(result, options.out, right=right)
    vllm_error = _vllm_error()
    result["vllm"] = vllm_error or _vllm_version()
    print(f"vLLM's operators: {result['vllm']}", flush=True)
    bytes_per_s = copy_bandwidth(torch, device)
    result["copy_bytes_per_s"] = round(bytes_per_s)
    result["batch_us"] = grouping(torch, device, vllm=vllm_error is None)

    wanted = list(gpu_cases.cases())
    result["cases"], result["rows"] = len(wanted), []
    for row in timed(wanted, made, device, bytes_per_s, started + options.seconds, vllm=vllm_error is None):
        result["rows"].append(row)
        print(_line(row), flush=True)
    result["left_out"] = len(wanted) - len(result["rows"])
    result["goals"] = gpu_cases.goals(result["rows"])
    for goal in result["goals"]:
        print(goal, flush=True)
    return _write(result, options.out, right=True)


def correctness(made: Any, device: Any, *, small: bool = False, graphs: bool = True) -> tuple[list[Any], bool]:
    """Every check, eager and in a graph: its largest error by dtype relative to the tolerance, and whether all hold."""
    from benchmarks import gpu_check

    worst: dict[str, float] = {}
    wrong = []
    for number, check in enumerate(gpu_check.checks(small=small)):
        for graph in (False, True) if graphs and number % 3 == 0 and check.pattern != "base" else (False,):
            error = gpu_check.run(check, made, device, graph=graph)
            name = f"{str(check.dtype).removeprefix('torch.')} {'graph' if graph else 'eager'}"
            worst[name] = max(worst.get(name, 0.0), error)
            if error > 1:
                wrong.append(f"{check}, {'graph' if graph else 'eager'}: {error:.3g} times the tolerance")
    for text in wrong:
        print("WRONG", text, flush=True)
    print("errors relative to the tolerance:", {name: round(value, 4) for name, value in worst.items()}, flush=True)
    return [{"error_per_tolerance": worst, "wrong": wrong}], not wrong


def timed(
    wanted: Sequence[Case], made: Any, device: Any, bytes_per_s: float, until: float, *, vllm: bool
) -> Iterator[dict[str, object]]:
    """Time the cases until the clock says `until`; cases that share weights one after the other."""
    import torch

    from benchmarks import gpu_weights

    for group in gpu_cases.by_weights(wanted):
        if time.monotonic() > until:
            return
        largest = max(group, key=lambda case: case.adapters)
        few = min(group, key=lambda case: case.adapters)
        copies = gpu_weights.copies_for(few, MEMORY_BUDGET_BYTES * few.adapters // largest.adapters)
        stacks = gpu_weights.make_stacks(largest, copies, torch.bfloat16, device)
        for case in group:
            if time.monotonic() > until:
                return
            mine = stacks.first(case.adapters)
            x = torch.randn(case.rows, case.n_in, dtype=torch.bfloat16, device=device)
            y = torch.zeros(case.rows, sum(case.widths), dtype=torch.bfloat16, device=device)
            slots = case.slot_of_row()
            calls = {"ours": gpu_weights.ours(made, case, mine, x, y, slots)}
            if vllm:
                calls["vllm"] = gpu_weights.vllms(case, mine, x, y, slots)
            enough = min(copies, gpu_weights.copies_for(case))
            us = {f"{name} graph": value for name, value in in_graph(torch, calls, enough).items()}
            if case.rows in EAGER_ROWS:
                us |= {f"{name} eager": value for name, value in eagerly(torch, calls, min(enough, 32)).items()}
            yield {**gpu_cases.row(case, us, case.floor_us(bytes_per_s)), "copies": enough}
            made.forget()
        del stacks, mine, calls
        if vllm:
            gpu_weights.forget_vllms()
        torch.cuda.empty_cache()


def in_graph(torch: Any, calls: dict[str, Callable[[int], None]], copies: int) -> dict[str, float]:
    """Microseconds of one call among many in a CUDA graph, each on other weights; medians of rounds taken in turn."""
    number = max(GRAPH_CALLS, copies)
    graphs = {}
    for name, call in calls.items():
        for copy in range(copies):
            call(copy)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(number):
                call(i % copies)
        graphs[name] = graph
    return _in_turn(torch, {name: graph.replay for name, graph in graphs.items()}, number)


def eagerly(torch: Any, calls: dict[str, Callable[[int], None]], copies: int) -> dict[str, float]:
    """Microseconds of one call outside of a graph, the host's work included."""
    number = max(GRAPH_CALLS, copies)

    def many(call: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for i in range(number):
                call(i % copies)

        return run

    return _in_turn(torch, {name: many(call) for name, call in calls.items()}, number)


def _in_turn(torch: Any, runs: dict[str, Callable[[], None]], calls_per_run: int) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            took[name].append(begin.elapsed_time(end) * 1e3 / calls_per_run)
    return {name: median(values) for name, values in took.items()}


def copy_bandwidth(torch: Any, device: Any) -> float:
    """Bytes per second, in and out together, of copies of 1 GiB."""
    size = 1 << 30
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(_in_turn(torch, {"copy": lambda: target.copy_(source)}, 1)["copy"] for _ in range(2))
    return 2 * size / (best * 1e-6)


def grouping(torch: Any, device: Any, *, vllm: bool) -> dict[str, float]:
    """Microseconds that the host spends on cutting a batch, once per step: ours, and vLLM's for the same rows."""
    from lora_plugins.kernels.triton_ops.operators import Batch

    took = {}
    for rows in (64, 8192):
        slots = torch.arange(rows, device=device) % 16
        batch = Batch(rows, 16, device)
        runs = {"ours": lambda batch=batch, slots=slots: batch.cut(slots, set(range(16)), base_rows=False)}
        if vllm:
            from vllm.lora.ops.triton_ops import LoRAKernelMeta

            meta = LoRAKernelMeta.make(16, rows, device=device)
            runs["vllm"] = lambda meta=meta, slots=slots: meta.prepare_tensors(slots)
        for name, run in runs.items():
            run()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                run()
            took[f"{name} {rows} rows"] = round((time.perf_counter() - begin) / 50 * 1e6, 1)
            torch.cuda.synchronize()
    return took


def prepare(sources: Path) -> None:
    """Put what the machine with the GPU lacks into `CARRIED`: vLLM's Python files, and pyzmq, which they import."""
    shutil.rmtree(CARRIED, ignore_errors=True)
    for path in sorted(sources.rglob("*")):
        relative = path.relative_to(sources)
        if "models" in relative.parts:  # a third of it, and never imported
            continue
        wanted = path.suffix == ".py" or ".dist-info" in relative.parts[0]
        if path.is_file() and wanted and relative.parts[0].startswith("vllm"):
            target = CARRIED / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if not (CARRIED / "vllm" / "lora").is_dir():
        raise SystemExit(f"{sources} holds no vllm/lora; it should be an unpacked wheel of vLLM")
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 26, 17)]
    target = ["--target", str(CARRIED), "--python-version", "3.12", "--only-binary=:all:", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *target, *platforms, "pyzmq"], check=True)
    size = sum(path.stat().st_size for path in CARRIED.rglob("*") if path.is_file())
    print(f"{CARRIED}: {size >> 20} MiB")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_gpu")
    parser.add_argument("--prepare", type=Path, metavar="SOURCES")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    return parser.parse_args(argv)


def _vllm_error() -> str | None:
    try:
        from vllm.lora.ops.triton_ops import lora_expand, lora_shrink  # noqa: F401
    except Exception as error:
        return f"not measured: {type(error).__name__}: {error}"
    return None


def _vllm_version() -> str:
    from importlib import metadata

    return metadata.version("vllm")


def _device(torch: Any) -> dict[str, object]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_processors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _line(row: dict[str, Any]) -> str:
    figures = " ".join(f"{name} {row[name]}" for name in row if " " in name)
    return (
        f"{row['model']} {row['layer']} rows {row['rows']} adapters {row['adapters']} "
        f"rank {row['rank']}/{row['slot_rank']}: {figures}"
    )


def _write(result: dict[str, Any], out: Path, *, right: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "kernels_gpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path, "" if right else "(NOT CORRECT, so nothing was timed)", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
