"""The documentation site: `make docs` writes it to ``build/site``.

The sources are the pages that people read on GitHub, so links between pages, examples
and results are relative paths that work in both places. Three things are made here:

- the navigation: from the lists of links in each ``README.md``;
- a page for each example, from its docstring and its code;
- the Python reference, by autodoc, from docstrings (``docs/reference/api.md``).
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import mpitrain  # noqa: E402

project = "mpitrain"
author = copyright = "The mpitrain developers"
release = version = mpitrain.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

root_doc = "README"
source_suffix = {".md": "markdown", ".py": "example"}
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"),
    *("examples/**.md", "examples/**.py", "benchmarks/**.md"),
    *("slurm/README.md", "pbs/README.md", "hostfiles/README.md", "packaging/README.md"),
]
exclude_patterns = ["examples/pictures.py"]
myst_heading_anchors = 4  # the anchors that GitHub makes
myst_linkify_fuzzy_links = False
# Blocks of code without a language are commands, or what they print.
highlight_language = "none"
default_role = "py:obj"  # `Trainer` in a docstring is a link, and `(N,)` is only code

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = (
    "none"  # docstrings give shapes and units; annotations are in the code
)
napoleon_use_ivar = True

smartquotes = False  # flags have two hyphens

html_theme = "furo"
html_title = f"mpitrain {release}"
html_extra_path = ["site"]
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


class ExampleParser(MystParser):
    """Shows a Python file as a page: the docstring, then the code."""

    supported = ("example",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        text = ast.get_docstring(ast.parse(inputstring)) or ""
        name = Path(document.current_source).name
        code = inputstring.split('"""', 2)[-1].lstrip()
        super().parse(f"# {name}\n\n{text}\n\n````python\n{code}````\n", document)


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the pages that a README lists into the navigation, below it.

    The lists of ``docs/README.md``, each with its caption, are those of the whole site.
    """
    is_root = docname == root_doc
    listed = ROOT / ("docs/README.md" if is_root else f"{docname}.md")
    if listed.name != "README.md" or docname == "docs/README":
        return
    _, *parts = re.split(r"^\*\*(.*)\*\*$", listed.read_text(), flags=re.MULTILINE)
    for caption, part in (
        zip(parts[::2], parts[1::2], strict=True) if is_root else [("", source[0])]
    ):
        rows = "\n".join(re.findall(r"^(?:- |  |\| ).*", part, re.MULTILINE))
        links = re.findall(r"\]\(([^)#:]+)\.(?:md|py)\)", rows)
        pages = [(listed.parent / link).resolve().relative_to(ROOT) for link in links]
        below = [
            it for it in pages if is_root or it.is_relative_to(Path(docname).parent)
        ]
        if below:
            names = "\n".join(f"/{it}" for it in dict.fromkeys(below))
            option = f":caption: {caption}\n" if caption else ""
            source[0] += f"\n```{{toctree}}\n:hidden:\n{option}\n{names}\n```\n"


def mark_code(app: Sphinx, what: str, *event: object) -> None:
    """Make code of a docstring's indented paragraphs, and text of ``Returns:``.

    Napoleon takes the words before a colon there, or in an attribute's, for a type.
    """
    lines = event[-1]
    assert isinstance(lines, list)
    if what in ("attribute", "property"):
        lines.insert(0, "\\ ")  # nothing to see
    if "Returns:" in lines:
        at = lines.index("Returns:")
        lines[at : at + 2] = [f":returns: {lines[at + 1].strip()}"]
    for i in range(len(lines) - 1, 0, -1):
        before = next((line for line in reversed(lines[:i]) if line.strip()), " ")
        is_prose = before[0] != " " and not before.endswith("::")
        if lines[i].startswith("    ") and not lines[i - 1] and is_prose:
            lines[i:i] = [".. code-block:: python", ""]


def setup(app: Sphinx) -> None:
    app.add_source_parser(ExampleParser)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", mark_code, priority=100)  # before napoleon
