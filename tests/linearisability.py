"""Whether what concurrent operations answered can be told as one after the other (Wing and Gong, 1993).

Each operation has an interval, and a function from the state before it to the states that its answer allows after it.
A history is linearisable where the operations have an order that keeps every operation before those that began after
its end, and in which each answer fits the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State")


@dataclass(eq=False)
class Operation(Generic[State]):
    """One operation of a history.

    Attributes:
        began, ended: its interval; an end of infinity where nobody knows whether it is over.
        leads_to: the states that its answer allows after a state; none where the answer does not fit the state.
        after: operations that come before this one, whatever their intervals say.
        may_be_missing: it may have had no effect, as after a cancellation.
    """

    what: str
    began: float
    ended: float
    leads_to: Callable[[State], Iterable[State]]
    after: Sequence[Operation[State]] = field(default=())
    may_be_missing: bool = False

    def __str__(self) -> str:
        return f"{self.began * 1e3:9.3f} … {self.ended * 1e3:9.3f} ms  {self.what}"


def is_linearisable(operations: Sequence[Operation[State]], first: State) -> bool:
    """Whether some order of the operations explains all their answers, from the state `first` on."""
    numbers = {operation: number for number, operation in enumerate(operations)}
    before = [
        sum(1 << numbers[other] for other in operations if other.ended < operation.began or other in operation.after)
        for operation in operations
    ]
    everything, seen, todo = (1 << len(operations)) - 1, {(0, first)}, [(0, first)]
    while todo:
        done, state = todo.pop()
        if done == everything:
            return True
        for number, operation in enumerate(operations):
            if done >> number & 1 or before[number] & ~done:
                continue
            states = set(operation.leads_to(state)) | ({state} if operation.may_be_missing else set())
            for then in states:
                if (reached := (done | 1 << number, then)) not in seen:
                    seen.add(reached)
                    todo.append(reached)
    return False


def told(operations: Sequence[Operation[State]]) -> str:
    """A history to read, in order of its beginnings."""
    return "\n".join(map(str, sorted(operations, key=lambda it: (it.began, it.ended))))
