"""Follows "Add a file format" of CONTRIBUTING.md in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_walk_through_works(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = page.split("\n## Add a file format\n")[1].split("\n## ")[0]
    module, tests = map(textwrap.dedent, re.findall(r" ```python\n(.*?) ```", text, re.DOTALL))
    row = re.search(r"`(FileFormat\(.*?\))`", text)
    assert row
    package = tmp_path / "faststep"
    shutil.copytree(
        ROOT / "python" / "faststep", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    formats = package / "data" / "formats"
    (formats / "points.py").write_text(module)
    listed = (formats / "detect.py").read_text()
    listed, imports = re.subn(
        r"^(from \.parquet import .*\n)",
        r"\1from .points import is_points, open_points\n",
        listed,
        flags=re.MULTILINE,
    )
    listed, rows = re.subn(r"^(FORMATS = \[\n)", rf"\1    {row[1]},\n", listed, flags=re.MULTILINE)
    assert imports == rows == 1
    (formats / "detect.py").write_text(listed)
    (tmp_path / "test_formats_points.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
