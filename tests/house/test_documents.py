"""README.md, CONTRIBUTING.md and docs/: links, paths and modules exist; sentences of README.md are short.

A code span counts as a path of the repository when it has a slash, begins with a folder of the repository or of the
package, and ends with a slash or with the suffix of a file that is kept here. Paths may leave out ``dask_gpurt/``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dask_gpurt"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
#: words of a sentence in README.md, at most
LONGEST = 25

_FENCE = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"^[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|sh|md|json|toml|yaml|yml|ipynb|cfg|c|png|trace))$")
_MODULE = re.compile(r"python3? -m ((?:benchmarks|dask_gpurt)(?:\.\w+)*)")


def prose(text: str) -> str:
    """The text without fenced blocks."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_folders() -> set[str]:
    """Names that a path of the repository may begin with; ignored folders, such as environments, do not count."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    names = {path.split("/", 1)[0] for path in found if "/" in path}
    # Without git (an unpacked archive): the folders that are here.
    names = names or {path.name for path in ROOT.iterdir() if path.is_dir()}
    return names | {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}


def missing(document: Path, text: str) -> list[str]:
    """Links, paths and modules in a document that do not exist."""
    out = []
    for target in _LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document if not name else (document.parent / name)
        if not path.exists():
            out.append(f"link {target}")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text() if name else text):
            out.append(f"link {target}: no such heading")
    folders = first_folders()
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text))
    # A span may be a command, as a fenced block is.
    for word in [word for some in (*spans, *_FENCE.findall(text)) for word in some.split()]:
        if "/" not in word or not _PATH.match(word) or word.split("/", 1)[0] not in folders:
            continue
        if not (ROOT / word).exists() and not (PACKAGE / word).exists():
            out.append(f"path {word}")
    for module in _MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            out.append(f"module {module}")
    return out


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown text: of paragraphs, list items, headings and cells of tables."""
    out = []
    text = re.sub(r"!?\[([^\]\n]*)\]\([^)]*\)", r"\1", prose(text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", text):
        for cell in re.split(r"(?<!\\)\|", block) if block.lstrip().startswith("|") else [block]:
            out += [s.strip() for s in re.split(r"(?<=[.!?:])\s+", " ".join(cell.split())) if s.strip()]
    return out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    assert missing(document, document.read_text()) == []


def test_sentences_of_the_readme_are_short() -> None:
    found = sentences((ROOT / "README.md").read_text())
    assert len(found) > 20
    assert [s for s in found if len(s.split()) > LONGEST] == []


def test_the_changelog_has_no_links() -> None:
    """The site shows it as a page of `docs/`, from where they lead nowhere: its build fails."""
    assert "](" not in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_wrong_is_found() -> None:
    text = (
        "# A heading\n[a](nowhere.md), [b](#no-heading), [c](#a-heading), `tests/nowhere.py`, `tiers/nowhere/`, "
        "`shuffle/seam.py`, `run.html`\n\n```\nbash ci/nowhere.sh\npython -m benchmarks.nowhere\n```\n"
    )
    assert missing(ROOT / "README.md", text) == [
        "link nowhere.md",
        "link #no-heading: no such heading",
        "path tests/nowhere.py",
        "path tiers/nowhere/",
        "path ci/nowhere.sh",
        "module benchmarks.nowhere",
    ]
    assert sentences("One two. Three\nfour:\n\n- five\n- six\n\n| a | b |\n|---|---|\n| c. d | e |") == [
        *("One two.", "Three four:", "- five", "- six", "a", "b", "---", "---", "c.", "d", "e")
    ]
