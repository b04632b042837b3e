"""What stands at the end of each command's help: a few lines to copy."""

from __future__ import annotations

from collections.abc import Mapping


def _examples(*lines: str) -> str:
    # Typer keeps the lines of a paragraph that begins so.
    return "\n".join(("\b", "Examples:", *(f"  lora-plugins {line}" for line in lines)))


EXAMPLES: Mapping[str, str] = {
    "doctor": _examples("doctor", "doctor --url http://127.0.0.1:8000", "doctor --no-network --json"),
    "resolve": _examples(
        "resolve team/sql",
        "resolve 'team/*' --dry-run",
        "resolve team/sql --base-model org/llama-8b --max-lora-rank 16",
    ),
    "inspect": _examples("inspect ./out/checkpoint-500", "inspect hf://org/repo@main --json", "inspect team/sql"),
    "pull": _examples("pull team/sql 'other/*'", "pull s3://bucket/loras/sql", "pull --file adapters.txt --quiet"),
    "ls": _examples("ls", "ls --remote", "ls --json"),
    "verify": _examples("verify", "verify 583503f503f1", "verify 'team/*'"),
    "gc": _examples("gc --dry-run --max-bytes 20GB", "gc"),
    "rm": _examples("rm team/sql", "rm 'old/*' --dry-run", "rm 583503f503f1"),
    "top": _examples("top", "top --once --url http://gpu-7:8000"),
    "load": _examples(
        "load team/sql", "load sql --uri s3://bucket/loras/sql", "load --file adapters.txt --url http://gpu-7:8000"
    ),
    "unload": _examples("unload team/sql", "unload 'team/*' --drain 5", "unload team/sql --block"),
    "refresh": _examples("refresh team/sql", "refresh '*' --json", "refresh team/sql --if-match d97bd125c00b"),
    "rollback": _examples("rollback team/sql", "rollback team/sql --to 583503f503f1"),
    "pin": _examples("pin team/sql team/poet"),
    "unpin": _examples("unpin '*'"),
    "prefetch": _examples("prefetch team/sql team/poet", "prefetch --file adapters.txt"),
}
