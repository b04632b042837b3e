"""Web servers that answer wrongly on purpose or by accident: the right bytes arrive, or the fetch is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import re
import resource
from collections.abc import Callable
from typing import Any

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.object_store import ObjectSource
from testbed import faults
from tests.resolvers.sources.object_bed import FILES, LIMITS, Bed, locate, read
from tests.resolvers.sources.web_bed import WebFiles

Answer = tuple[int, dict[str, str], bytes]
MALFORMED = "broke off or is malformed"


def moved(answer: Answer) -> Answer:
    """A range one byte further on."""
    status, head, data = answer
    start, end, size = map(int, re.findall(r"\d+", head["Content-Range"]))
    return status, {**head, "Content-Range": f"bytes {start + 1}-{end + 1}/{size}"}, data


def of_other_size(answer: Answer) -> Answer:
    return (
        answer[0],
        {**answer[1], "Content-Range": re.sub(r"/\d+", "/99999999", answer[1]["Content-Range"])},
        answer[2],
    )


def without(name: str) -> Callable[[Answer], Answer]:
    return lambda it: (it[0], {key: value for key, value in it[1].items() if key != name}, it[2])


def having(status: int | None = None, **head: str) -> Callable[[Answer], Answer]:
    named = {key.replace("_", "-"): value for key, value in head.items()}
    return lambda it: (status or it[0], {**it[1], **named}, it[2])


def zipped(answer: Answer) -> Answer:
    return answer[0], {**answer[1], "Content-Encoding": "gzip"}, gzip.compress(answer[2], 1)


# Changes of answers, and what the refusal says; nothing where the right bytes arrive.
HOSTILE: dict[str, tuple[Callable[[Answer], Answer], str]] = {
    "another range": (moved, MALFORMED),
    "another size": (of_other_size, MALFORMED),
    "no range": (without("Content-Range"), MALFORMED),
    "several ranges": (having(Content_Range="", Content_Type="multipart/byteranges; boundary=b"), MALFORMED),
    "200 for a range": (having(200), MALFORMED),
    "a longer body": (lambda it: (*it[:2], it[2] + b"x"), MALFORMED),
    "a shorter body": (lambda it: (*it[:2], it[2][:-1]), MALFORMED),
    "no content": (lambda it: (204, it[1], b""), "HTTP 204"),
    "another version": (having(ETag='"another"'), "changed meanwhile"),
    "no version": (without("ETag"), MALFORMED),
    "gzip": (zipped, ""),
    "no gzip, but so called": (having(Content_Encoding="gzip"), MALFORMED),
    "an unknown encoding": (having(Content_Encoding="x-own"), ""),
    "100 MB in little": (lambda it: zipped((*it[:2], bytes(100 << 20))), MALFORMED),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_answer_is_refused_or_the_bytes_are_right(bed: Bed, web: Any, case: str) -> None:
    change, says = HOSTILE[case]
    template, handler = web
    handler.files = {f"/l/sql/{file}": data for file, data in FILES.items()}

    def get(self: WebFiles) -> None:
        if self.path not in handler.files or "Range" not in self.headers:
            WebFiles.do_GET(self)
            return
        data = handler.files[self.path]
        start, end = map(int, re.findall(r"\d+", self.headers["Range"]))
        head = {"ETag": f'"{hash(data)}"', "Content-Range": f"bytes {start}-{end}/{len(data)}"}
        answer = 206, head, data[start : end + 1]
        status, head, body = change(answer) if self.path.endswith(WEIGHTS_FILE) else answer
        self.head(status, {**head, "Content-Length": str(len(body))})
        with contextlib.suppress(OSError):  # who refuses an answer does not read on
            self.wfile.write(body)

    handler.do_HEAD, handler.do_GET = WebFiles.do_GET, get
    source = ObjectSource(template, limits=LIMITS)
    found = locate(source)
    assert found is not None
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    if says:
        with pytest.raises(SourceUnavailable, match=says):
            asyncio.run(bed.obtain(source, found))
    else:
        assert read(asyncio.run(bed.obtain(source, found))) == FILES
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before_mb < 50
    bed.assert_clean()


def test_a_negative_size_hides_no_other_files_size(bed: Bed) -> None:
    """Both sizes together are 0, less than any limit; a list of a file's ranges then took all memory."""
    etags = [f"&quot;{hashlib.md5(data, usedforsecurity=False).hexdigest()}&quot;" for data in FILES.values()]
    sizes = (-(10**30), 10**30)
    listed = "".join(
        f"<Contents><Key>loras/sql/{name}</Key><ETag>{etag}</ETag><Size>{size}</Size></Contents>"
        for name, etag, size in zip(FILES, etags, sizes, strict=True)
    )
    page = f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"
    bed.proxy.plan(faults.status(200, page.encode()), path="list-type=2", times=None)
    with pytest.raises(SourceUnavailable, match=rf"'{CONFIG_FILE}': found a file of -10+ bytes"):
        locate(bed.source())
