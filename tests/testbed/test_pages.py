"""The blocks that a reader of a page would copy."""

from __future__ import annotations

from testbed.pages import blocks

PAGE = """# A page
```
make it
```
1. In a list:
   ```yaml
   a:
     b: c
   ```

```console
$ run it \\
$ again
output `inline`
```
"""


def test_blocks_come_in_order_with_language_and_line():
    assert [(one.language, one.line, one.first) for one in blocks(PAGE)] == [
        ("", 3, "make it"),
        ("yaml", 7, "a:"),
        ("console", 12, "$ run it \\"),
    ]


def test_a_block_in_a_list_loses_its_indent():
    assert blocks(PAGE)[1].text == "a:\n  b: c\n"


def test_commands_of_a_console_are_behind_its_prompts():
    console = blocks(PAGE)[2]
    assert (console.commands(), console.shown()) == ("run it \\\nagain\n", "output `inline`\n")
    assert (blocks(PAGE)[0].commands(), blocks(PAGE)[0].shown()) == ("make it\n", "")
