"""The versions that compute an answer, each with its first token: `lora_versions` in the outputs to the API server.

In an engine core, the scheduler says which weights a request begins with, and when the request moves to other weights;
then the scheduler asks which versions an output names. Requests that the version asked for computes are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AnswerVersions:
    """The versions of the answers of one engine.

    Attributes:
        spans: by id of request, versions in order: the name of the weights, and the number of their first token.
    """

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[str, int]]] = {}
        # Moves whose first batch has not come back: the batch's number, and the weights.
        self._moves: dict[str, list[tuple[int, str]]] = {}
        # Batches come back in the order in which they were scheduled.
        self._scheduled_count = self._returned_count = 0

    def begin(self, request_id: str, weights: str) -> None:
        """Have an answer without a token be of these weights."""
        self.spans[request_id] = [(weights, 0)]
        self._moves.pop(request_id, None)

    def move(self, request_id: str, before: str, after: str) -> None:
        """Have the next batch to be scheduled compute an answer with other weights."""
        self.spans.setdefault(request_id, [(before, 0)])
        self._moves.setdefault(request_id, []).append((self._scheduled_count, after))

    def batch_is_scheduled(self) -> None:
        self._scheduled_count += 1

    def batch_is_back(self, requests: Mapping[str, Any]) -> None:
        """Have moved weights begin at the first token that is still to come, once their first batch has come back.

        Only then is the token known: vLLM rejects drafts, and drops or delivers the tokens under way at a preemption.
        """
        for request_id, moves in list(self._moves.items()):
            while moves and moves[0][0] <= self._returned_count:
                self.spans[request_id].append((moves.pop(0)[1], requests[request_id].num_output_tokens))
            if not moves:
                del self._moves[request_id]
        self._returned_count += 1

    def forget(self, request_id: str) -> None:
        self.spans.pop(request_id, None)
        self._moves.pop(request_id, None)
