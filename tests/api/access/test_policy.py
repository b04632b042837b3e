"""The policy file: whose key may use what, and files that cannot be right."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.api.access.policy import Policy
from lora_plugins.errors import InvalidSettings

HASH = hashlib.sha256(b"hashed-key").hexdigest()
POLICY = f"""
[default]
adapters = ["public/*"]

[tenants.team-a]
keys = ["sha256:{HASH}", "plain-key"]
adapters = ["team-a/*", "shared/sql"]

[tenants.team-b]
keys = ["b"]
adapters = []

[tenants.operators]
keys = ["root"]
admin = true
"""


@pytest.fixture
def policy() -> Policy:
    return Policy.parse(POLICY)


LINKS = """
[default]
adapters = ["public/*"]
[tenants.a]
keys = ["a"]
adapters = ["team-a/*", "shared/sql", "a-*", "flat", "everybody/*"]
[tenants.b]
keys = ["b"]
adapters = ["team-b/*", "b-*", "everybody/*"]
[tenants.root]
keys = ["root"]
admin = true
"""


@pytest.mark.parametrize(
    ("name", "place", "may"),
    [
        ("team-a/sql", "team-a/sql-v3", True),
        ("team-a/sql", "team-a/releases/v3", True),
        ("team-a/sql@v1", "team-a/sql", True),
        ("team-a/steal", "team-b/sql", False),
        ("team-a/steal", "", False),
        ("team-a/steal", "public/sql", False),
        ("everybody/sql", "team-a/sql", False),
        ("public/x", "team-a/sql", False),
        # A name that stands in the policy as it is, may lead to its neighbours: its publisher's versions.
        ("shared/sql", "shared/sql-v3", True),
        ("flat", "flat-v3", True),
        ("flat", "team-b/sql", False),
        ("a-steal", "b-sql", False),
        # Nobody but administrators may use it.
        ("internal/sql", "team-b/sql", True),
    ],
)
def test_where_a_link_of_an_adapter_may_lead(name, place, may):
    assert Policy.parse(LINKS).may_lead(name, place) is may


@pytest.mark.parametrize(
    ("label", "keys"),
    [
        ("team-a", ["hashed-key", "plain-key"]),
        ("team-b", ["b"]),
        ("operators", ["root"]),
        ("(default)", [None, "", "plain-key ", "PLAIN-KEY", HASH, f"sha256:{HASH}", "é\udcff"]),
    ],
)
def test_whose_key_it_is(policy, label, keys):
    assert {policy.of_key(key).label for key in keys} == {label}


@pytest.mark.parametrize(
    ("key", "may", "may_not"),
    [
        ("plain-key", ["team-a/x", "team-a/x@v1", "shared/sql"], ["team-b/x", "public/x", "shared/sql2", "team-a"]),
        ("b", [], ["team-b/x", "public/x", "", "team-a/x*1"]),
        ("root", ["team-a/x", "anything", "team-a/x*1+team-b/y*1"], []),
        (None, ["public/x", "public/x*1+public/y*1"], ["team-a/x", "public/x*1+team-a/y*1"]),
        ("plain-key", ["team-a/x*1", "team-a/x*0.7+shared/sql@v2*-0.3"], ["team-a/x*0", "team-a/x*0+team-b/y*1"]),
        ("plain-key", [], [f"team-a/x*1+{other}" for other in ("team-b/y*1", "shared/other*1", "team-b/y*1@2070c155")]),
    ],
)
def test_who_may_use_what(policy, key, may, may_not):
    """A mixture needs the right to each part."""
    principal = policy.of_key(key)
    assert all(principal.may_use(name) for name in may)
    assert not any(principal.may_use(name) for name in may_not)
    assert principal.is_admin == (key == "root")


def test_it_says_whom_it_knows_and_keeps_no_key(policy):
    assert policy.labels == ("team-a", "team-b", "operators")
    assert policy.key_count == 4
    kept = repr(vars(policy)).encode()
    for key in ("hashed-key", "plain-key"):
        assert key.encode() not in kept
        assert repr(hashlib.sha256(key.encode()).digest()).encode() not in kept, "nor its digest"


@pytest.mark.parametrize("text", ["", "[default]", "[default]\nadapters = []", "[tenants]"])
def test_an_empty_policy_lets_nobody_use_an_adapter(text):
    policy = Policy.parse(text)
    for key in (None, "", "x"):
        assert not policy.of_key(key).may_use("sql")
        assert not policy.of_key(key).is_admin


TENANT = '[tenants.t]\nkeys = ["secret-key"]\nadapters = ["*"]\n'
SECRET_HASH = hashlib.sha256(b"secret-key").hexdigest()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants = ", "no TOML (at"),
        ("[default]\nshare = 0", "default.share: Expected `float` > 0.0"),
        (TENANT + "share = 1.01", "tenants.t.share: Expected `float` <= 1.0"),
        (TENANT + "pushes = ['']", "tenants.t.pushes[0]: Expected `str` matching"),
        (TENANT + "pushes_per_minute = 0", "tenants.t.pushes_per_minute: Expected `int` >= 1"),
        (TENANT + "requests_per_minute = 0", "tenants.t.requests_per_minute: Expected `int` >= 1"),
        ("[default]\ntokens_per_minute = '9'", "default.tokens_per_minute: Expected `int | null`, got `str`"),
        ("[default]\npushes = ['x']", "default: Object contains unknown field `pushes`"),
        ("[tenant.t]", "the file: Object contains unknown field `tenant`"),
        (TENANT + "role = 'x'", "tenants.t: Object contains unknown field `role`"),
        ("tenants.t = 1", "tenants.t: Expected `object`, got `int`"),
        ("[default]\nadapters = '*'", "default.adapters: Expected `list | null`, got `str`"),
        ("[default]\nadapters = ['a', '']", "default.adapters[1]: Expected `str` matching"),
        ("[default]\nadapters = [' a']", "default.adapters[0]: Expected `str` matching"),
        ("[tenants.t]\nadapters = ['*']", "tenants.t: Object missing required field `keys`"),
        ("[tenants.t]\nkeys = []\nadapters = ['*']", "tenants.t.keys: Expected `list` of length >= 1"),
        ("[tenants.t]\nkeys = ['secret-key']", "tenants.t without adapters"),
        ("[tenants.t]\nkeys = ['']\nadapters = []", "no header can carry in tenants.t.keys[0]"),
        ("[tenants.t]\nkeys = ['secret-key secret-key']\nadapters = []", "no header can carry"),
        ("[tenants.t]\nkeys = ['ok', 'secret-key\\u00e9'.x]\nadapters = []", "no TOML"),
        ('[tenants.t]\nkeys = ["secret-key\\u00e9"]\nadapters = []', "no header can carry"),
        ("[tenants.t]\nkeys = ['sha256:']\nadapters = []", "malformed hash in tenants.t.keys[0]"),
        (f"[tenants.t]\nkeys = ['sha256:{HASH[:-1]}g']\nadapters = []", "malformed hash"),
        (TENANT + "[tenants.u]\nkeys = ['x', 'secret-key']\nadapters = []", "tenants.t.keys[0] once more in tenants.u"),
        (TENANT + f"[tenants.u]\nkeys = ['sha256:{SECRET_HASH}']\nadapters = []", "once more in tenants.u.keys[0]"),
        (TENANT + f"[tenants.u]\nkeys = ['sha256:{SECRET_HASH.upper()}']\nadapters = []", "once more"),
        ("[tenants.t]\nkeys = ['secret-key', 'secret-key']\nadapters = []", "once more in tenants.t.keys[1]"),
    ],
)
def test_startup_fails_with_a_wrong_file_and_shows_no_key(tmp_path, text, says):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettings) as caught:
        Policy.read(path)
    told = str(caught.value)
    assert says in told
    assert all(part in told for part in ("[L007]", "LORA_PLUGINS_POLICY", "expected", str(path)))
    assert not any(part in told for part in ("secret-key", SECRET_HASH))


def test_startup_fails_with_an_unreadable_file(tmp_path):
    with pytest.raises(InvalidSettings, match="No such file"):
        Policy.read(tmp_path / "gone.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(InvalidSettings, match="no UTF-8"):
        Policy.read(tmp_path / "latin.toml")


def test_a_file_is_read(tmp_path: Path):
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "policy.toml").write_text(POLICY, encoding)
        assert Policy.read(tmp_path / "policy.toml").of_key("root").is_admin


@given(key=st.text(max_size=40))
def test_no_key_that_is_not_listed_is_anybodys(policy, key):
    if key not in {"hashed-key", "plain-key", "b", "root"}:
        assert policy.of_key(key) is policy.default


def test_the_documented_policy_is_one():
    page = (Path(__file__).parents[3] / "docs" / "guides" / "access.md").read_text()
    block = page.split("```toml\n")[1].split("```")[0]
    policy = Policy.parse(block)
    assert len(policy.labels) == 3
    assert policy.of_key("key-of-team-a").may_use("team-a/sql")
    assert not policy.of_key("key-of-team-a").may_use("team-b/sql")
    assert policy.of_key("key-of-team-b").may_use("shared/chat")
    assert policy.of_key("key-of-the-operators").is_admin


def test_nobody_owns_or_pushes_a_mixture() -> None:
    policy = Policy.parse('[tenants.a]\nkeys = ["a"]\nadapters = ["a"]\npushes = ["*", "a*1"]\n')
    tenant = policy.of_key("a")
    for name in ("a*1", "a@v*1", "a*1+b*1"):
        assert (tenant.owns(name), tenant.may_push(name), tenant.is_named(name)) == (False, False, False)
