"""Recipes of package managers have the version and the dependencies of setup.cfg."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import yaml

import mpitrain

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "packaging"
NAMES = {"pytorch": "torch"}  # conda's


def dependencies() -> dict[str, str]:
    """Return the minimum version of each by its name; empty without one."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].split("\n")
    return dict(re.findall(r"^([\w.-]+)(?: >= (.*))?$", "\n".join(lines), re.MULTILINE))


def test_conda() -> None:
    recipe: Any = yaml.safe_load((RECIPES / "conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == mpitrain.__version__
    python, *found = recipe["requirements"]["run"]
    assert python.startswith("python >=")
    pairs = (re.fullmatch(r"(\S+)(?: >=(.*))?", it) for it in found)
    by_name = {it[1]: it[2] or "" for it in pairs if it}
    assert {NAMES.get(k, k): v for k, v in by_name.items()} == dependencies()


def test_spack() -> None:
    text = (RECIPES / "spack/package.py").read_text()
    compile(text, "package.py", "exec")
    assert f'version("{mpitrain.__version__}"' in text
    found = re.findall(r'depends_on\("py-([\w-]+)(?:@(.*):)?", type=\(', text)
    assert dict(found) == dependencies()


def test_easybuild() -> None:
    (file,) = (RECIPES / "easybuild").glob(f"mpitrain-{mpitrain.__version__}-*.eb")
    names: dict[str, Any] = {}
    exec(file.read_text(), names)
    found = {it[0].lower() for it in (*names["dependencies"], *names["exts_list"])}
    # Within the bundles.
    bundled = {"jinja2", "psutil", "threadpoolctl", "numpy"}
    torch = {"pytorch": "torch"}
    ours = {torch.get(it, it) for it in found} - {"mpitrain"}
    assert set(dependencies()) - bundled == {
        it for it in ours if "bundle" not in it
    } - {"python"}


def test_the_citation_has_the_version() -> None:
    citation: Any = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mpitrain.__version__
