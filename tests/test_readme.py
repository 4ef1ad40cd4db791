"""README's file tree is made from the first line of every file's docstring; `IOTA_REWRITE=1` rewrites it."""

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- /tree -->"


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`])[.:;](?= |$)", line)[0].rstrip(".")


def tree() -> str:
    rows = []
    for path in sorted((ROOT / "src/iota").rglob("*.py")):
        place = path.relative_to(ROOT / "src")
        if path.name == "__init__.py" and not first_sentence(path):
            continue
        rows.append(f"{place!s:<44} {first_sentence(path)[:110]}")
    return "\n".join(rows) + "\n"


def test_every_file_says_what_it_is():
    silent = [
        str(p.relative_to(ROOT))
        for p in (ROOT / "src/iota").rglob("*.py")
        if p.stat().st_size and not first_sentence(p)
    ]
    assert silent == []


def test_the_tree_in_the_readme_is_true():
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    there, _, after = rest.partition(END)
    assert after, "README.md has no tree between its markers"
    if os.environ.get("IOTA_REWRITE") and there != tree():
        readme.write_text(before + BEGIN + tree() + END + after)
        there = tree()
    assert there == tree(), "README.md's tree is stale: IOTA_REWRITE=1 pytest tests/test_readme.py rewrites it"


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    names = re.findall(r"`((?:src|tests|recipes|lab)/[\w./*-]+)`", text)
    missing = [name for name in names if not list(ROOT.glob(name.rstrip("/")))]
    assert missing == []
