"""Sessions whose cells are exported, and where to."""

from __future__ import annotations

import pytest

from tests.shells import fresh_shell
from tests.ship.cells import IMPORTS


@pytest.fixture
def shell():
    with fresh_shell() as shell:
        shell.run_cell(IMPORTS).raise_error()
        yield shell


@pytest.fixture
def loaded_shell(shell):
    shell.run_cell("%load_ext patchlab").raise_error()
    return shell


@pytest.fixture
def path(tmp_path):
    return tmp_path / "patches.py"
