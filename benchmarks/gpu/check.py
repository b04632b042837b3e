"""Goal of R27 on a GPU, before any figure of docs/explanation/kernels-gpu.md.

Correctness on the device itself, against float64, before anything is timed.

Every operator as vLLM's layers use it: linear, shrink and expand apart (fully sharded layers), embedding, logits, and
linear with vectors in some slots (DoRA, a bias, IA3 without rank). What must not be read is NaN; what must not be
written, base rows and padding, is compared bit for bit. A captured graph is replayed for other batches, with other
adapters of other ranks, and other vectors, in the slots than it was captured with. Writes check.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.session import Job, Session, noted

SCALE = 0.5
RANKS = (16, 0, 5, 64, 8, 33, 48, 1)  # one for each slot; the slot rank is 64 or more
VECTORS = {16: (0, 1), 0: (1, 0), 33: (1, 1)}  # by rank, whether g and c say anything: a bias, IA3, DoRA with a bias
LINEAR, SHRINK, EXPAND, EMBEDDING, LOGITS = "linear", "shrink", "expand", "embedding", "logits"
# ||error|| / ||what the adapters add||: weights and inputs are exact, t and y are rounded to the dtype once each.
MOST_NORM = {"float32": 1e-4, "float16": 1.5e-3, "bfloat16": 5e-3}
# Largest error relative to the largest value, so that one wrong element among millions is seen.
MOST_ELEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
INTERPRETED = 2.0  # times as much: Triton's interpreter cuts float32 to bfloat16, where a device rounds


@dataclass(frozen=True)
class Check:
    """One call: `rows` real rows and `padding` rows, a slot or -1 for each real one by `pattern`.

    The layer sees them alone; the batch has `unseen` rows after them. `turned`: whether slots have `VECTORS`.
    """

    operator: str
    rows: int
    n_in: int
    widths: tuple[int, ...]
    slot_rank: int
    dtype: str
    pattern: str
    padding: int = 0
    offset: int = 0
    add_inputs: bool = True
    unseen: int = 0
    turned: bool = False

    def slot_of_row(self) -> list[int]:
        slots, rows = len(RANKS), self.rows + self.unseen
        match self.pattern:
            case "one slot":
                return [slots - 3] * rows
            case "in turn":  # base rows too
                return [row % (slots + 1) - 1 for row in range(rows)]
            case "pieces":
                return [row * (slots + 1) // rows - 1 for row in range(rows)]
            case _:
                return [-1] * rows


def checks(*, small: bool = False) -> Iterator[Check]:
    """Every plan and path, every dtype, even and odd sizes; `small` for where the interpreter computes."""
    rows = (18,) if small else (1, 3, 16, 64, 300, 2048, 5000)
    shapes = [(67, (33, 16))] if small else [(4096, (4096, 1024, 1024)), (14336, (4096,)), (1023, (515, 77))]
    vocabulary, hidden = (131, 40) if small else (128256, 4096)
    for dtype in ("bfloat16", "float16", "float32"):  # what people serve with comes first
        for n_in, widths in shapes:
            for n_rows in rows:
                padding = 2 if n_rows > 1 else 0
                for pattern in ("in turn", "pieces", "one slot"):
                    yield Check(LINEAR, n_rows, n_in, widths, 64, dtype, pattern, padding, turned=pattern == "pieces")
                yield Check(LINEAR, n_rows, n_in, widths, 64, dtype, "in turn", padding, add_inputs=False)
                for operator in (SHRINK, EXPAND):
                    yield Check(operator, n_rows, n_in, widths, 64, dtype, "in turn", padding)
        yield Check(LINEAR, 4, *shapes[0], 64, dtype, "in turn", unseen=60)
        for n_rows in rows:
            yield Check(LINEAR, n_rows, *shapes[-1], 64, dtype, "one slot", turned=True)
            yield Check(EXPAND, n_rows, *shapes[0], 64, dtype, "pieces", offset=16, add_inputs=False)
            yield Check(EMBEDDING, n_rows, 0, (hidden,), 64, dtype, "pieces", padding=1)
        for n_rows in rows[:4]:
            yield Check(LOGITS, n_rows, hidden, (vocabulary,), 64, dtype, "in turn")
    yield Check(LINEAR, 4, *shapes[0], 128, "bfloat16", "base", padding=1)


class Call:
    """The tensors of one check and the call on them.

    Attributes:
        y: what the operator writes. before: what was in it.
    """

    def __init__(self, check: Check, operators: Any, on: Any, *, filled: bool = True) -> None:
        import torch

        from lora_plugins.kernels.slot_ranks import SlotRanks
        from lora_plugins.kernels.triton_ops.operators import Batch

        self.check, self.torch, self.filled = check, torch, filled
        self.dtype = dtype = getattr(torch, check.dtype)
        self.device = on
        slots, rows = len(RANKS), check.rows + check.padding
        self.a = [self._normal(slots, 1, check.slot_rank, check.n_in, dtype=dtype) for _ in check.widths]
        extra = 64 if check.operator == LOGITS else 0  # vLLM pads the vocabulary of B
        self.b = [self._normal(slots, 1, width + extra, check.slot_rank, dtype=dtype) for width in check.widths]
        self.ranks = SlotRanks(slots, [check.slot_rank] * len(check.widths))
        if check.operator == EMBEDDING:
            operators.register((self._normal(slots, 3, check.slot_rank, dtype=dtype),), self.b, self.ranks)
        else:
            operators.register(self.a, self.b, self.ranks, takes_vectors=check.operator == LINEAR)
        self.batch = Batch(rows + check.unseen, slots, on)
        self.slot_of_row: list[int] = []
        if check.operator in (EXPAND, EMBEDDING):
            self.x = self._normal(
                len(check.widths),
                rows,
                check.slot_rank,
                dtype=dtype if check.operator == EMBEDDING else torch.float32,
            )
        else:
            self.x = self._normal(rows, check.n_in, dtype=dtype)
        if check.operator == SHRINK:
            self.before = torch.full((len(check.widths), rows, check.slot_rank), float("nan"), device=on)
        else:
            # About as large as what the adapters add, so that the rounding of y does not hide an error in that.
            self.size = 0.1 * (SCALE * 0.1 * check.n_in**0.5 if check.n_in else 1.0) * (sum(RANKS) / len(RANKS)) ** 0.5
            made = self._normal(rows, check.offset + sum(check.widths), dtype=dtype)
            self.before = made.mul_(self.size) if filled else made
        self.y = self.before.clone()

    def _normal(self, *shape: int, dtype: Any) -> Any:
        if not self.filled:
            return self.torch.empty(*shape, dtype=dtype, device=self.device)
        made = self.torch.randn(*shape, device=self.device)
        return (made.mul_(0.1) if len(shape) == 4 else made).to(dtype)

    def fill(self, ranks: Sequence[int]) -> None:
        """Put other adapters into the slots, in place, of these ranks; beyond them NaN."""
        from lora_plugins.kernels.slot_ranks import Vectors

        for slot, rank in enumerate(ranks):
            self.ranks.writing(slot)
            for a, b in zip(self.a, self.b, strict=True):
                if self.filled:
                    for part in (a, b):
                        part[slot].copy_(self._normal(1, 1, *part.shape[2:], dtype=self.dtype)[0])
                    a[slot, 0, rank:] = float("nan")
                    b[slot, 0, :, rank:] = float("nan")
            self.ranks.written(slot, [rank] * len(self.check.widths))
            if self.filled and self.check.turned and rank in VECTORS:
                g, c = (own * self.torch.randn(sum(self.check.widths)) for own in VECTORS[rank])
                self.ranks.turn(slot, Vectors(1 + g / 2, c * self.size))

    def cut(self, slot_of_row: Sequence[int]) -> None:
        """Take a batch of these slots; what belongs to no adapter becomes NaN in the input."""
        torch, self.slot_of_row = self.torch, list(slot_of_row[: self.check.rows])
        in_use = {slot for slot in slot_of_row if slot >= 0}
        self.batch.cut(torch.tensor(slot_of_row, device=self.device), in_use, base_rows=min(slot_of_row) < 0)
        if not self.filled:
            return
        idle = [row for row in range(self.x.shape[-2]) if self.slot(row) < 0]
        fresh = torch.randn(self.x.shape, device=self.device).to(self.x.dtype)
        fresh[..., idle, :] = float("nan")
        if self.check.operator in (EXPAND, EMBEDDING):
            for slot, ranks in enumerate(self.ranks[slot] for slot in range(len(RANKS))):
                mine = [row for row, of in enumerate(self.slot_of_row) if of == slot]
                fresh[:, mine, ranks[0] :] = float("nan")
        self.x.copy_(fresh)

    def slot(self, row: int) -> int:
        return self.slot_of_row[row] if row < len(self.slot_of_row) else -1

    def __call__(self) -> None:
        torch, check, tensors = self.torch, self.check, self.batch.tensors
        operators = torch.ops.lora_plugins
        match check.operator:
            case "shrink":
                operators.lora_shrink(self.y, self.x, self.a, *tensors, SCALE)
            case "expand" | "embedding":
                operators.lora_expand(
                    self.y, self.x, self.b, *tensors, list(check.widths), check.offset, check.add_inputs
                )
            case _:
                operators.lora_linear(
                    self.y, self.x, self.a, self.b, *tensors, list(check.widths), SCALE, check.offset, check.add_inputs
                )

    def error(self) -> float:
        """The error relative to what is allowed: at most 1 is right.

        Raises:
            AssertionError: something was written that must not be.
        """
        torch, check = self.torch, self.check
        want, adds = self._expected()
        if check.operator != SHRINK:
            idle = [row for row in range(self.y.shape[0]) if self.slot(row) < 0]
            assert torch.equal(self.y[idle], self.before[idle]), f"{check}: a row of no adapter was written"
            assert torch.equal(self.y[:, : check.offset], self.before[:, : check.offset]), f"{check}: columns before"
        mine = [row for row in range(check.rows) if self.slot(row) >= 0]
        wrong = (self.y.double() - want)[..., mine, check.offset :] if check.operator != SHRINK else self.y - want
        if not wrong.numel():
            return 0.0
        if not bool(wrong.isfinite().all()):
            return float("inf")
        norm = float(wrong.norm() / adds.norm().clamp_min(1e-30))
        element = float(wrong.abs().max() / want.abs().nan_to_num().max())
        most = "float32" if check.operator == SHRINK else check.dtype  # it stores the float32 sums
        allowed = INTERPRETED if most == "bfloat16" and self.y.device.type == "cpu" else 1.0
        return max(norm / MOST_NORM[most], element / MOST_ELEMENT[most]) / allowed

    def _expected(self) -> tuple[Any, Any]:
        """The float64 result, and what the adapters add to what was there."""
        check, torch = self.check, self.torch
        want = torch.zeros_like(self.y, dtype=torch.float64) if check.operator == SHRINK else self.before.double()
        adds = torch.zeros_like(want)
        offset = check.offset
        for i, width in enumerate(check.widths):
            for slot in range(len(RANKS)):
                mine = [row for row, of in enumerate(self.slot_of_row) if of == slot]
                rank = self.ranks[slot][i]
                if not mine:
                    continue
                if check.operator in (EXPAND, EMBEDDING):
                    t = self.x[i, mine, :rank].double()
                else:
                    t = SCALE * self.x[mine].double() @ self.a[i][slot, 0, :rank].double().T
                if check.operator == SHRINK:
                    adds[i, mine, :rank] = t
                else:
                    adds[mine, offset : offset + width] = t @ self.b[i][slot, 0, :width, :rank].double().T
            if check.operator != SHRINK:
                offset += width
        if not check.add_inputs:
            mine = [row for row, slot in enumerate(self.slot_of_row) if slot >= 0]
            want[mine, check.offset :] = 0
        for slot, vectors in self.ranks.vectors.items():
            mine = [row for row, of in enumerate(self.slot_of_row) if of == slot]
            g, c = (side.to(self.device).double() for side in vectors)
            adds[mine] = g * (want[mine] + adds[mine]) + c - want[mine]
        return want + adds, adds


def error_of(check: Check, operators: Any, gpu: Gpu, seed: int, *, graph: bool = False) -> float:
    """The error of one call relative to what is allowed, eager or in a graph."""
    gpu.torch.manual_seed(seed)
    # A size that is captured never takes the dense path, neither in a graph nor before it; see `Operators`.
    operators.captured_rows = check.rows if graph else 0
    call = Call(check, operators, gpu.device)
    try:
        if graph:  # captured for another batch, with other adapters in the slots
            call.fill(RANKS[3:] + RANKS[:3])
            call.cut([row % len(RANKS) for row in range(check.rows + check.unseen)])
            replay = gpu.captured(call)
            call.fill(RANKS)
            call.cut(check.slot_of_row())
            call.y.copy_(call.before)
            replay()
        else:
            call.fill(RANKS)
            call.cut(check.slot_of_row())
            call()
        gpu.synchronize()
        return call.error()
    finally:
        operators.forget()


def in_a_graph(check: Check) -> bool:
    """Whether a graph may hold the call: one batch of base rows alone launches nothing, and the host decides that."""
    return check.pattern != "base" and check.rows <= 2048


def compile_jobs(wanted: Sequence[Check], table: Any) -> list[Job]:
    """One job for each set of kernels that the checks launch."""
    first: dict[object, Check] = {}
    for check in wanted:
        plan = table.plan(check.rows + check.padding, check.n_in, max(check.widths))
        first.setdefault((check.operator, check.n_in, check.widths, check.dtype, check.add_inputs, plan), check)
    return [(_compile, (check, table)) for check in first.values()]


def _compile(check: Check, table: Any) -> None:
    from lora_plugins.kernels.triton_ops import operators

    operators.use(made := operators.Operators(replace(table, dense_min_rows=None)))
    call = Call(check, made, "cpu", filled=False)
    call.fill(RANKS)
    call.cut(check.slot_of_row())
    call()


def all_right(
    session: Session, keep: Callable[[dict[str, object]], None], wanted: Sequence[Check]
) -> tuple[dict[str, float], list[str], int]:
    """Do the checks, eager and, where one may, in a graph.

    Returns:
        The largest error of each kind relative to what is allowed; what is wrong; how many checks time was left for.
    """
    worst: dict[str, float] = {}
    wrong: list[str] = []
    for number, check in enumerate(wanted):
        if session.is_over:
            return worst, wrong, number
        for graph in (False, True) if in_a_graph(check) else (False,):
            name = f"{check.operator} {check.dtype} {'graph' if graph else 'eager'}"
            try:
                error = error_of(check, session.made, session.gpu, seed=number, graph=graph)
            except AssertionError as problem:
                error, text = float("inf"), str(problem)
            else:
                text = f"{check}: {error:.3g} times what is allowed"
            worst[name] = max(worst.get(name, 0.0), error)
            if not error <= 1:
                wrong.append(f"{'graph' if graph else 'eager'}: {text}")
                keep({"wrong": wrong[-1]})
    return worst, wrong, len(wanted)


def run(session: Session) -> bool:
    """Do all checks; False where one is wrong, or had no time."""
    result = session.result("check")
    wanted = list(checks(small=session.gpu.rehearsal))
    result.note(**session.compile_ahead(compile_jobs(wanted, session.table), 1 / 2))
    with noted() as missed:
        worst, wrong, did = all_right(session, result.add, wanted)
    for name, error in sorted(worst.items()):
        result.add({"kind": name, "error / allowed": round(error, 4)})
    result.finish(checks=len(wanted), done=did, wrong=len(wrong), compiled_late=sorted(missed), allowed=MOST_NORM)
    print(f"{did} of {len(wanted)} checks, {len(wrong)} wrong, {len(missed)} kernels compiled late", flush=True)
    return not wrong and did == len(wanted)
