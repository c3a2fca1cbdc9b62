"""Sphinx: the pages, and a reference made of the docstrings (`make docs`).

The sources are read from the root of the repository, so that the links between the pages are the
same there and here.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import faststep  # noqa: E402

project = "faststep"
version = release = faststep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**", "benchmarks/results/*"]
exclude_patterns = [".*", "build", "benchmarks/results/local"]
root_doc = "docs/index"
html_theme = "furo"
html_title = f"faststep {release}"
html_copy_source = False
html_extra_path = ["redirect/index.html"]

# Headings get the names that hosts of repositories give them.
myst_heading_anchors = 3

# Docstrings have names in single backticks, and arguments and errors in Google's style.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # torch's are in another style
napoleon_numpy_docstring = False
napoleon_use_param = False  # several arguments may share a line

# With -n a name that leads nowhere is a warning. Types of others are documented elsewhere, and
# ours that are no part of the interface are not documented at all.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|os|nn)\..*"),
    ("py:.*", r"faststep\.data\.transforms\.mixing\.Labels"),
    ("py:.*", r"faststep\.data\.workers\.frozen\..*"),
    ("py:.*", r"faststep\.data\.(arrays\.converted\.Converted|loader\._T_co)"),
    ("py:.*", r"typing_extensions\.Unpack"),
    ("py:.*", r"faststep\.data\.(types\.TorchOptions|transforms\.geometry\.Geometry)"),
    ("py:.*", r"faststep\.zero\.(engine\.Engine|transport\.group\.Group)"),
]
