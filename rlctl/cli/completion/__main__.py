"""``python -m rlctl.cli.completion [FOLDER]`` writes the scripts (into completions/ by default)."""

import sys
from pathlib import Path

from rlctl.cli.completion import scripts

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "completions")
folder.mkdir(parents=True, exist_ok=True)
for name, text in scripts().items():
    (folder / name).write_text(text)
