"""Answers of the admin API, read as what anybody may have sent: of one server, or of all replicas on Ray Serve."""

from __future__ import annotations

import json
from typing import Any


def object_of(answer: str | bytes) -> dict[str, Any]:
    """Return the JSON object in an answer; empty for any other text, such as a proxy's page."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def rows_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of replicas, each with `replica`, `status` and an object `body`; none for any other answer."""
    rows = content.get("replicas")
    if not isinstance(rows, list) or not all(isinstance(it, dict) and isinstance(it.get("status"), int) for it in rows):
        return []
    return [
        {"replica": "", **it, "body": it["body"] if isinstance(it.get("body"), dict) else {}, "said": it.get("body")}
        for it in rows
    ]
