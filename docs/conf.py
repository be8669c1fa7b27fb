"""Sphinx configuration of the site: ``bash ci/docs.sh``. The pages are Markdown that GitHub shows as well."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext")]

from dask_gpurt._version import __version__  # noqa: E402

project = "dask-gpurt"
author = "the dask-gpurt authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "gpurt_pages",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext"]
# Fences without a language hold diagrams and terminal output.
highlight_language = "none"

myst_enable_extensions = ["colon_fence"]
# As deep as links between the pages go; the anchors are GitHub's.
myst_heading_anchors = 4

napoleon_google_docstring = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = f"dask-gpurt {release}"
html_show_copyright = False
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": False,
    "navigation_depth": 2,
    "header_links_before_dropdown": 6,
    "footer_start": [],
    "footer_end": [],
}
