"""Write down what a script finds."""

import json
import os
import sys
from pathlib import Path

found = {
    "variables": dict(os.environ),
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "spec": getattr(__spec__, "name", None),
    "package": __package__,
    "argv": sys.argv,
    "path": sys.path[0],
}
Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
