"""Sphinx: Markdown pages; those of docs/reference are made by generate.py."""

import everstep

project = "everstep"
author = "The everstep authors"
copyright = author
release = version = everstep.__version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "everstep"
html_copy_source = False
html_show_sourcelink = False
