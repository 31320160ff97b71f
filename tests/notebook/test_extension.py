"""The extension comes and goes, and leaves nothing in the shell or in transformers."""

from __future__ import annotations

from transformers import modeling_utils, monkey_patching

from patchlab.render.shown import rich_views
from tests.notebook.patched_cells import BUILD, PATCHED, SAID, assert_nothing_left, replaced


def parts(shell):
    """What the extension could leave in a shell and in transformers."""
    manager = shell.magics_manager
    return (
        list(shell.input_transformers_cleanup),
        {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()},
        {kind: sorted(names) for kind, names in manager.magics.items()},
        sorted(manager.registry),
        list(rich_views),
        modeling_utils.apply_patches,
        modeling_utils.patch_output_recorders,
        monkey_patching.get_patch_mapping(),
    )


def test_unloading_leaves_nothing(bare_shell):
    bare_shell.run_cell("%unload_ext nothing")  # IPython loads magics of its own on first use.
    before = parts(bare_shell)
    bare_shell.run_cell("%load_ext patchlab").raise_error()
    assert parts(bare_shell) != before

    bare_shell.run_cell("%unload_ext patchlab").raise_error()

    assert parts(bare_shell) == before
    assert not bare_shell.run_cell("%%patched A=B\n1").success


def test_reloading_twice_is_harmless(shell, capsys):
    before = [len(part) for part in parts(shell)[:5]]
    shell.run_cell("%reload_ext patchlab\n%reload_ext patchlab\n%load_ext patchlab").raise_error()
    assert [len(part) for part in parts(shell)[:5]] == before

    shell.run_cell(PATCHED + BUILD).raise_error()

    assert capsys.readouterr().out.count(SAID) == 1
    assert_nothing_left(shell)


def test_unloading_inside_a_patched_cell_ends_its_patch(shell):
    shell.run_cell(f"{PATCHED}{BUILD}%unload_ext patchlab\nother = BertModel(config)").raise_error()

    assert (replaced(shell), replaced(shell, "other")) == (2, 0)


def test_terminal_waits_for_the_body(shell):
    assert shell.check_complete("%%patched A=B")[0] == "incomplete"
    assert shell.check_complete("%%patched A=B\nx = 1")[0] == "incomplete"
    assert shell.check_complete("%%patched A=B\nx = 1\n\n")[0] == "complete"
