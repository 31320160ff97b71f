"""patchlab is typed for those who use it: a script checks strictly, and mistakes are found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "tests" / "data"


def checked(name):
    """Return the lines of a sample in which mypy finds an error, with strict settings."""
    # The project's own settings and cache: a check of the whole may have filled it.
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(SAMPLES / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert not ran.stderr, ran.stderr
    return {int(number) for number in re.findall(r"^\S+\.py:(\d+): error", ran.stdout, re.M)}


def test_a_script_that_uses_the_public_names_is_well_typed_and_runs():
    assert checked("user_script.py") == set()
    script = [sys.executable, "-W", "error", str(SAMPLES / "user_script.py")]
    ran = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_each_mistake_of_a_user_is_found():
    lines = (SAMPLES / "user_mistakes.py").read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}

    assert checked("user_mistakes.py") == wrong
