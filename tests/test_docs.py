"""The pages: every link between them leads to a file, and to a heading that is there."""

import fnmatch
import re
import types
from pathlib import Path

import pytest

import faststep
from faststep.data.formats.detect import FORMATS

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = {"build", "dist"}  # as are folders whose names begin with a dot
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|\b(?:src|href)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"[a-z]+:")
FILE = re.compile(r"[\w*]+\.(py|pyi|c|h|cu|def|md)")
# What a reader of CONTRIBUTING writes, what `make bench` writes, and what CPython has.
NOT_HERE = {
    "benchmarks/results/local",
    "Python.h",
    "csrc/rules/signsgd.h",
    "python/faststep/optim/signsgd.py",
    "python/faststep/data/formats/points.py",
    "tests/data/test_formats_points.py",
}
NAMES = {
    path.name
    for top in ("csrc", "cuda", "docs", "python", "tests", "benchmarks")
    for path in (ROOT / top).rglob("*.*")
}
HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    found = []
    for path in sorted(root.rglob("*.md")):
        folders = path.relative_to(root).parts[:-1]
        if not any(name in NOT_OURS or name.startswith(".") for name in folders):
            found.append(path)
    return found


def anchors(page: Path) -> set[str]:
    """The names that hosts of repositories, and myst_heading_anchors, give to headings."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"[^\w\- ]", "", title).lower() for title in HEADING.findall(text)]
    return {title.replace(" ", "-") for title in titles}


def broken(root: Path) -> list[str]:
    """What is wrong, as "page: link"."""
    found = []
    for page in pages(root):
        text = CODE.sub("", page.read_text())
        for link in (first or second for first, second in LINK.findall(text)):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if ELSEWHERE.match(link):
                continue
            inside = target.is_relative_to(root.resolve()) and target.exists()
            if not inside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                found.append(f"{page.relative_to(root).as_posix()}: {link}")
    return found


def test_links_between_pages_lead_somewhere() -> None:
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"} <= {
        page.name for page in pages(ROOT)
    }
    assert broken(ROOT) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](other.md)", None),
        ("[a\nb](docs/far.md#two-words-and-code)", None),
        ("[a](#here), [b](https://host/none.md), `[c](none.md)`", None),
        ("```\n[a](none.md)\n```", None),
        ("![a](none.png)", "none.png"),
        ("[a](docs/none.md)", "docs/none.md"),
        ("[a](other.md#none)", "other.md#none"),
        ("[a](#none)", "#none"),
        ("[a](../other.md)", "../other.md"),
        ('<img src="none.svg">', "none.svg"),
        ("   ```\n   x\n   ```\n[a](none.md)", "none.md"),
    ],
)
def test_a_broken_link_is_caught(tmp_path: Path, text: str, complaint: str | None) -> None:
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "build").mkdir()
    (root / "build" / "built.md").write_text("[a](none.md)")
    (root / "other.md").write_text("# Title\n")
    (root / "docs" / "far.md").write_text(
        "# Far\n\n```\n## none\n```\n\n## Two words, and `code`\n"
    )
    (root / "page.md").write_text(f"# Here\n\n{text}\n")
    (tmp_path / "other.md").write_text("outside")
    assert broken(root) == ([] if complaint is None else [f"page.md: {complaint}"])


def is_there(name: str) -> bool:
    """Whether a path, from the root or a folder that pages write for, or a file's name, exists."""
    tops = [
        ROOT,
        *(ROOT / top for top in ("csrc", "docs", "python/faststep", "python/faststep/data")),
    ]
    return any(any(top.glob(name)) for top in tops) or bool(fnmatch.filter(NAMES, name))


def test_files_that_pages_name_are_there() -> None:
    tops = {path.name for path in ROOT.iterdir()} | {"_torch", "data", "optim", "rules"}
    missing = []
    for page in pages(ROOT):
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for name in re.findall(r"`([\w.*/-]+)`", text):
            is_path = name.split("/")[0] in tops if "/" in name else FILE.fullmatch(name)
            if is_path and name not in NOT_HERE and not is_there(name):
                missing.append(f"{page.relative_to(ROOT).as_posix()}: {name}")
    assert missing == []


def test_the_architecture_is_one_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(page.split()) <= 1000
    assert page.count("\n```\n") >= 6, "the pictures of the rooms, a gradient and a batch"


def test_the_reference_has_all_public_names() -> None:
    """Sphinx documents what modules export; the names of faststep itself are listed one by one."""
    reference = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    modules = set(re.findall(r"automodule:: (\S+)", reference))
    functions = set(re.findall(r"autofunction:: (\S+)", reference))
    for name in faststep.__all__:
        if isinstance(getattr(faststep, name), types.ModuleType):
            assert f"faststep.{name}" in modules
        else:
            assert name in functions


def test_the_page_on_security_has_all_variables_and_formats() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    sources = [ROOT / "setup.py", *(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.c")]
    read = {name for path in sources for name in re.findall(r"FASTSTEP_[A-Z]+", path.read_text())}
    assert len(read) >= 5
    assert {name for name in read if f"`{name}`" not in page} == set()
    files = page.split("\n## Data files\n")[1].split("\n## ")[0]
    assert [kind.name for kind in FORMATS if kind.name.split()[0] not in files] == []
