"""The pages say what the package does."""

import re

import pytest
from programs import ROOT

DOCS = ROOT / "docs"
SOURCES = [
    re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # the lines of a message are joined
    for suffix in ("py", "h", "cpp")
    for path in (ROOT / "visdet").rglob(f"*.{suffix}")
]


@pytest.mark.parametrize(
    "message", re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
)
def test_troubleshooting_explains_messages_that_exist(message):
    pattern = re.compile(re.escape(message).replace("visdet::", r"(visdet|\{self\.scope\})::"))
    assert any(pattern.search(source) for source in SOURCES)


def test_every_page_is_in_the_table_of_contents():
    entries = set(re.findall(r"^[\w/]+$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    assert {page for page in pages - {"index"} if not page.startswith("api/")} <= entries
