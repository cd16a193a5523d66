"""The front end as one script: what is understood, and what is refused."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from sonde.errors import OptionError
from sonde.views.web.bundle import as_function, bundle

MODULES = {
    "main.js": '// import of "prose" is none\nimport { twice, Thing as It } from "./lib/two.js";\n'
    'import * as all from "./lib/two.js";\nimport "./side.js";\nexport function name() { return "main"; }\n'
    'import("./lib/lazy.js").then(({ late }) => say(late));\nsay(twice(21), new It().n, all.kept, name());\n',
    "lib/two.js": 'import {\n  name,\n} from "../main.js";\nexport const twice = (n) => 2 * n;\n'
    'export class Thing { n = 7; }\nconst held = "kept " + name();\nexport { held as kept };\n',
    "lib/lazy.js": 'export const late = "late";\n',
    "side.js": 'say("side");\n',
}


def test_modules_become_one_script_that_a_browser_or_node_runs_in_their_order():
    script = bundle(MODULES, "main.js")
    assert "\nimport" not in script
    assert "\nexport" not in script
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here; the browser tests run the script of the viewer itself")
    done = subprocess.run([node, "-e", f"const say = (...all) => console.log(...all);\n{script}"], capture_output=True)
    assert done.stdout.decode().splitlines() == ["side", "42 7 kept main main", "late"], done.stderr.decode()


@pytest.mark.parametrize(
    "source",
    [
        "export default 3;",
        'import thing from "./side.js";',
        'export * from "./side.js";',
        "export const { a, b } = make();",
        "const where = import.meta.url;",
        "const page = import(name);",
    ],
)
def test_what_is_not_understood_is_refused_by_name(source):
    with pytest.raises(OptionError, match=r"main\.js of the viewer cannot be bundled: .* is not understood"):
        bundle(MODULES | {"main.js": source}, "main.js")


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(OptionError, match=r"main\.js of the viewer imports \./gone\.js, which is not there"):
        as_function("main.js", 'import { a } from "./gone.js";', {})
