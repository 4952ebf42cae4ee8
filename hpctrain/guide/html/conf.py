"""Settings of Sphinx for ``make docs``; ``pages.py`` writes the sources that Sphinx reads."""

import hpctrain

project = "hpctrain"
author = "The hpctrain developers"
project_copyright = author
release = hpctrain.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
highlight_language = "text"
myst_heading_anchors = 4
# The repr of an array contains an address, so defaults are shown as in the source.
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    # Methods of our own bases, such as LocalSGD's finish(), but none of torch's or Python's.
    "inherited-members": "Module, Exception, Generic, Protocol, Enum, int, dict, tuple",
}
napoleon_google_docstring = True
napoleon_custom_sections = [("Source", "notes"), ("Differs", "notes")]

html_theme = "furo"
pygments_style = "friendly"
pygments_dark_style = "native"
html_title = f"hpctrain {release}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"font-stack": "system-ui, sans-serif"},
    "dark_css_variables": {"font-stack": "system-ui, sans-serif"},
}
