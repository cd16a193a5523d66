"""Use the installed wheel as README.md says: its snippets, `sonde run`, `diagnose`, `view`. Run by check_wheel.py."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def sonde(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "sonde", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
Path("readme.py").write_text("\n".join(blocks))
subprocess.run([sys.executable, "readme.py"], check=True)
assert "missing_zero_grad" in sonde("diagnose", "runs/first", code=2)
script = blocks[0].split("with sonde.watch")[0].replace("import sonde\n", "")
script += """
for _ in range(60):
    x = torch.randn(32, 20)
    loss = F.cross_entropy(model(x), x[:, :5].argmax(1))
    loss.backward(); optimizer.step()
"""
Path("train.py").write_text(script)
assert "missing_zero_grad" in sonde("run", "train.py")
assert sonde("show", "runs/first")
checked = sonde("version", "--verbose")
without = "--without-compiler" in sys.argv
assert ("the C library was not built" in checked) == without, checked
print(checked)
