"""Settings of the site. `python docs/build.py` makes its pages from the notebooks and modules, and then calls Sphinx."""

from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
_config = ConfigParser(delimiters=["="])
_config.read(HERE.parent / "settings.ini", encoding="utf-8")
settings = _config["DEFAULT"]

project, author, release = settings["lib_name"], settings["author"], settings["version"]
copyright = settings["copyright"]
extensions = ["myst_nb", "sphinx-mathjax-offline"]  # MathJax comes with the site: equations need no network
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # outputs are stored in the notebooks
nb_merge_streams = True
nb_render_markdown_format = "myst"  # outputs are tables, which the default does not know
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "sphinx_book_theme"
html_title = "fedl2p"
html_baseurl = settings["doc_host"] + settings["doc_baseurl"] + "/"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": settings["git_url"],
    "repository_branch": settings["branch"],
    "use_repository_button": True,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "navbar_persistent": [],  # the search field is in the sidebar
}
