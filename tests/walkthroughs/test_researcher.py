"""A researcher whose policy is served while it learns: the page on the RL loop, with a swap in each step."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete
from testbed.models import PROMPT
from testbed.reference import Reference
from testbed.s3 import s3_server
from testbed.server import reserved_port
from tests.walkthroughs.reader import ROOT, Do, Step, Walk, left_out, reading
from tests.walkthroughs.small_server import PORT, folder_of_adapters, small

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(None in map(shutil.which, ("curl", "jq")), reason="the page uses them"),
]

KEY = "researcher"
SERVE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 \\"
TRAINER = ROOT / "examples" / "rl_loop.py"
TRAIN = "$ export LORA_PLUGINS_ADMIN_KEY=$KEY         # where the server asks for one"
FRAGMENT = "from lora_plugins.client import push"
PUSH_SERVER = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 LORA_PLUGINS_RESTORE=1 \\"
PUSH = "export LORA_PLUGINS_URL=http://localhost:8000 LORA_PLUGINS_ADMIN_KEY=$KEY"
FORM = 'curl -fsS -X PUT $LORA_PLUGINS_URL/v1/loras/policy -H "Authorization: Bearer $KEY" \\'
PAUSED_PUSH = "from lora_plugins.client import pause, push, resume"
PAUSE = "lora-plugins pause policy --mode keep"
FROM_S3 = "aws s3 cp --recursive policy-12 s3://adapters/policy/12"
TRL_SERVER = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS=lora_plugins \\"
DEAD_TRAINER = (
    'curl -fsS -X POST "$LORA_PLUGINS_URL/resume" -H "Authorization: Bearer $KEY"'
    " && lora-plugins unload 'trl-policy-v*'"
)

RL = Walk(
    "docs/guides/rl.md",
    [
        Step(SERVE, Do.SERVE),
        Step(TRAIN, before=f"mkdir examples && cp {TRAINER} examples"),
        Step(PUSH_SERVER, Do.SERVE),
        Step(FRAGMENT),
        Step(PUSH),
        Step(FORM),
        Step(PAUSED_PUSH),
        Step(PAUSE),
        Step(FROM_S3),
        left_out(TRL_SERVER, "make test-trainers runs it", "524d3dc5"),
        left_out("from peft import LoraConfig", "make test-trainers runs it", "6b0c5aad"),
        left_out(DEAD_TRAINER, "tests/e2e/test_pause.py runs it"),
        left_out("server {", "test_proxy.py runs it", "ec46c0d9"),
    ],
    {
        **small("BASE"),
        "rl_loop.py BASE": ("rl_loop.py {base}", "a tiny Llama"),
        **folder_of_adapters("/adapters"),
        " /adapters ": (" {adapters} ", "a folder of this test"),
        "localhost:8000": PORT,
        FRAGMENT: (f"from trainer import *\n{FRAGMENT}", "lines of the trainer, whose names the page has above"),
        PAUSED_PUSH: (f"from trainer import *\n{PAUSED_PUSH}", "lines of the trainer, as above"),
        "pushed.digest\n": ("pushed.digest\nprint(pushed.digest)\n", "what this test compares"),
    },
)
# The page's command of AWS: its client is not among what this project installs.
AWS = """#!{python}
import sys
from dataclasses import replace
from pathlib import Path
from testbed.s3 import Bucket, make_client
s3, cp, recursive, folder, uri = sys.argv[1:]
assert (s3, cp, recursive) == ("s3", "cp", "--recursive")
bucket, _, prefix = uri.removeprefix("s3://").partition("/")
Bucket(bucket, make_client("{url}")).put_directory(prefix, Path(folder))
"""


def steps(text: str) -> list[tuple[str, str, str]]:
    """Number, digest and whether it was swapped, of each step that the trainer printed."""
    form = r"^step (\d): digest (\w{12}), swapped (\w+), mean reward \d+\.\d\d$"
    return re.findall(form, text, re.MULTILINE)


def saved_below(root: Path) -> dict[Path, bytes]:
    """The weights of each version that the trainer has saved."""
    return {path: path.read_bytes() for path in (root / ".versions").glob("*/adapter_model.safetensors")}


def test_the_example_is_short_enough_to_copy() -> None:
    assert len(TRAINER.read_text().splitlines()) <= 44


@pytest.mark.timeout(1500)
def test_each_step_is_served_before_its_rollouts(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    for step, original in ((11, "chat"), (12, "sql")):  # what the trainer has saved in its eleventh and twelfth step
        shutil.copytree(bed.adapters / original, tmp_path / f"policy-{step}")
    with s3_server() as s3, reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        s3.bucket("adapters")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "aws").write_text(AWS.format(python=sys.executable, url=s3.url))
        (tmp_path / "bin" / "aws").chmod(0o755)
        env |= {
            **s3.env(),
            "PATH": f"{tmp_path / 'bin'}:{env['PATH']}",
            "KEY": KEY,
            "LORA_PLUGINS_URL": url,  # the example's own default is localhost:8000
            "LORA_PLUGINS_ALLOWED_URIS": "s3://adapters",  # as the page says of S3
        }
        values = {"base": str(bed.base), "adapters": str(root), "port": str(port)}
        # What the page's lines for pushes find in the trainer: names of the example, and of the lines before.
        text = {block.first: block.text for block in RL.blocks()}
        (tmp_path / "trainer.py").write_text(
            f"import sys\nsys.argv[1:] = {[str(bed.base), str(root), 'policy', '1']}\n"
            f"{TRAINER.read_text().partition('optimizer =')[0]}prompt = PROMPTS[0]\n"
            f"{text[FRAGMENT].partition('pushed =')[0]}"
        )
        with reading(RL, tmp_path, env=env, values=values, url=url) as reader:
            shown = next(block.shown() for block in RL.blocks() if block.first == TRAIN)
            said = steps(reader.printed[TRAIN])
            assert [(number, is_swapped) for number, _, is_swapped in said] == [
                (number, is_swapped) for number, _, is_swapped in steps(shown)
            ]
            assert len({digest for _, digest, _ in said}) == len(said) == 3
            (pushed,), swap = json.loads(reader.printed[PUSH])["adapters"], json.loads(reader.printed[FROM_S3])
            assert (pushed["swapped"], pushed["previous_digest"]) == (True, reader.printed[FRAGMENT].strip())
            assert json.loads(reader.printed[FORM])["digest"] == pushed["digest"], "the same files as a form"
            assert (swap["swapped"], swap["previous_digest"]) == (True, pushed["digest"])
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=240)
            asked = complete(client, "policy", PROMPT, MAX_TOKENS)
            assert (asked.error, list(asked.token_ids)) == ("", bed.answers["sql"])
            # The trainer's last version, which is still the one below the root, is in the store.
            (digest,) = [path.name for path in (tmp_path / "store").glob(f"{said[-1][1]}*")]
            rolled = client.post("/loras/policy/rollback", cast_to=object, body={"digest": digest})
            assert rolled["digest"] == digest
            reference = Reference(bed.base)
            expected = reference.generate(root / "policy", reference.prompt_ids(PROMPT), MAX_TOKENS)
            asked = complete(client, "policy", PROMPT, MAX_TOKENS)
            assert (asked.error, list(asked.token_ids)) == ("", expected)
            # Another name, run twice: the page's own name follows S3 by now. The first server has the trainer's root.
            reader.serve(next(block for block in RL.blocks() if block.first == SERVE))
            (train,) = [block for block in RL.blocks() if block.first == TRAIN]
            train = replace(train, text=train.text.replace(" policy ", " again "))
            reader.run(train)
            first_run = saved_below(root)
            second = steps(reader.run(train))
            assert [(number, is_swapped) for number, _, is_swapped in second] == [(n, "True") for n in "012"]
            saved = saved_below(root)
            assert {path: saved[path] for path in first_run} == first_run, "a version that is served was written again"
            assert len(saved) == len(first_run) + len(second)
