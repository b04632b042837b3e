"""S3 access points, which an ARN names in the place of a bucket; without any I/O.

```
arn:aws:s3:<region>:<account>:accesspoint/<name>
arn:aws:s3::<account>:accesspoint/<alias>.mrap                            multi-region
arn:aws:s3-outposts:<region>:<account>:outpost/<id>/accesspoint/<name>
```
An access point's alias (`…-s3alias`) is a bucket's name like any other. Object Lambda access points are none of these:
what they answer has not the size and ETag that their listing says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "arn:"
EXPECTED = "arn:aws:s3:region:account:accesspoint/name"

_ARN = re.compile(
    r"(?P<place>arn:aws[a-z-]*:s3(?P<outposts>-outposts)?:(?P<region>[a-z0-9-]*):[0-9]{12}):"
    r"(?:outpost[:/](?P<outpost>op-[a-z0-9]+)[:/])?accesspoint[:/]"
    r"(?P<name>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)(?P<multi>\.mrap)?(?:/(?P<key>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class AccessPoint:
    """An access point; `arn` in one of its two spellings, with slashes, and `region` empty for a multi-region one."""

    arn: str
    region: str


def split_access_point(path: str) -> tuple[AccessPoint, str] | None:
    """The access point that `path` begins with, and what follows the slash behind it; None where the ARN is none."""
    match = _ARN.fullmatch(path)
    if match is None:
        return None
    is_multi = match["multi"] is not None
    if bool(match["region"]) == is_multi or bool(match["outposts"]) != bool(match["outpost"]):
        return None
    resource = f"accesspoint/{match['name']}{match['multi'] or ''}"
    if match["outpost"]:
        resource = f"outpost/{match['outpost']}/{resource}"
    return AccessPoint(f"{match['place']}:{resource}", match["region"]), match["key"] or ""


def access_point_of(uri: str) -> AccessPoint | None:
    """The access point of an `s3://` URI, if it is not of a bucket."""
    found = split_access_point(uri.removeprefix("s3://"))
    return found[0] if found is not None else None


def split_bucket(uri: str) -> tuple[str, str]:
    """The bucket or access point of a well-formed `s3://` URI, and the key."""
    path = uri.removeprefix("s3://")
    found = split_access_point(path)
    if found is not None:
        return found[0].arn, found[1]
    bucket, _, key = path.partition("/")
    return bucket, key
