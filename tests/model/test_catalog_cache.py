"""The catalog's file on disk: used while it is right, made again when not, never in the way."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchlab.model import catalog as catalog_room
from patchlab.model import catalog_cache
from patchlab.model.catalog import build_catalog, load_catalog
from patchlab.model.catalog_source import package_root
from tests.toy_transformers import write_package


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The toy package, with the cache next to it."""
    monkeypatch.setenv("PATCHLAB_CACHE", str(tmp_path / "cache"))
    return write_package(tmp_path)


def cached_file(package: Path) -> Path:
    path = catalog_cache.cache_file(package, "9.9")
    assert path is not None
    return path


def test_second_load_reads_the_cached_file(package):
    """Guards the tests below: what is written into a fresh file is what the catalog then says."""
    build_catalog(package)
    path = cached_file(package)
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["other_names"] = ["FromTheFile"]
    path.write_bytes(gzip.compress(json.dumps(data).encode()))

    assert build_catalog(package).other_names == ("FromTheFile",)


def damage_by_cutting(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage_by_garbage(path: Path) -> None:
    path.write_bytes(b"not a gzip file")


def damage_by_emptying(path: Path) -> None:
    path.write_bytes(b"")


def damage_by_other_json(path: Path) -> None:
    path.write_bytes(gzip.compress(b"[1, 2]"))


def damage_by_missing_column(path: Path) -> None:
    data = json.loads(gzip.decompress(path.read_bytes()))
    del data["names"]
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


def damage_by_short_column(path: Path) -> None:
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["children"] = data["children"][1:]
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_cutting,
        damage_by_garbage,
        damage_by_emptying,
        damage_by_other_json,
        damage_by_missing_column,
        damage_by_short_column,
    ],
)
def test_damaged_file_is_built_again(package, damage):
    whole = build_catalog(package)
    damage(cached_file(package))

    again = build_catalog(package)

    assert again.names == whole.names
    data = json.loads(gzip.decompress(cached_file(package).read_bytes()))
    assert data["names"] == list(whole.names)


def test_changed_source_makes_the_file_stale(package):
    build_catalog(package)
    source = package / "models" / "toy" / "modeling_toy.py"
    source.write_text(source.read_text() + "\nclass Added(nn.Module): ...\n")

    assert build_catalog(package).named("Added")


def test_added_file_makes_the_file_stale(package):
    build_catalog(package)
    folder = package / "models" / "late"
    folder.mkdir()
    (folder / "modeling_late.py").write_text("from torch import nn\nclass Late(nn.Module): ...\n")

    assert build_catalog(package).named("Late")


def test_changed_reader_makes_the_file_stale(package, tmp_path, monkeypatch):
    reader = tmp_path / "reader.py"
    reader.write_text("1")
    monkeypatch.setattr(catalog_room, "READERS", (str(reader),))
    path = cached_file(package)
    build_catalog(package)
    stamp = json.loads(gzip.decompress(path.read_bytes()))["stamp"]

    reader.write_text("12")
    build_catalog(package)

    assert json.loads(gzip.decompress(path.read_bytes()))["stamp"] != stamp


def test_files_that_read_the_source_are_where_they_are_looked_for():
    """Guards the stamp, which passes over a file that is not there."""
    assert all(Path(reader).is_file() for reader in catalog_room.READERS)


def test_disk_that_cannot_be_written_leaves_the_catalog_in_memory(package, tmp_path, monkeypatch):
    # A file where the folder should be: refused even to root, unlike a read-only folder.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATCHLAB_CACHE", str(tmp_path / "file" / "cache"))

    assert build_catalog(package).named("Direct")
    assert (tmp_path / "file").read_text() == ""


def test_no_temporary_file_is_left(package):
    build_catalog(package)

    assert [path.name for path in cached_file(package).parent.iterdir()] == [
        cached_file(package).name
    ]


def test_failed_write_leaves_the_old_file_and_nothing_else(package, monkeypatch):
    path = cached_file(package)
    assert catalog_cache.write_cache(path, {"stamp": "old"})

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError("refused")

    monkeypatch.setattr(Path, "replace", refuse)

    assert not catalog_cache.write_cache(path, {"stamp": "new"})
    assert catalog_cache.read_cache(path, "old") == {"stamp": "old"}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_catalog_does_not_depend_on_the_order_of_sets(package, tmp_path):
    code = f"from patchlab.model.catalog import *; build_catalog(Path({str(package)!r}))"
    contents = []
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PATCHLAB_CACHE": str(tmp_path / seed)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        (path,) = (tmp_path / seed).iterdir()
        contents.append(gzip.decompress(path.read_bytes()))

    assert contents[0] == contents[1] == contents[2]


def test_processes_that_build_at_once_all_succeed(package):
    code = (
        "import sys; from pathlib import Path; from patchlab.model.catalog import build_catalog\n"
        f"for _ in range(5): print(len(build_catalog(Path({str(package)!r}))))\n"
        "from patchlab.model import catalog_cache as c\n"
        f"c.cache_file(Path({str(package)!r}), '9.9').unlink(missing_ok=True)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]

    outputs = [process.communicate(timeout=120)[0].split() for process in running]

    expected = [str(len(build_catalog(package)))] * 5
    assert outputs == [expected] * 3
    assert [process.returncode for process in running] == [0, 0, 0]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PATCHLAB_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/patchlab"),
        ({"PATCHLAB_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
    ],
)
def test_environment_names_the_cache_folder(monkeypatch, variables, expected):
    for name in ("PATCHLAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert catalog_cache.cache_folder() == Path(expected)


def test_it_is_told_once_and_on_standard_error_alone(package, capsys):
    build_catalog(package, progress=True)
    first = capsys.readouterr()
    build_catalog(package, progress=True)
    second = capsys.readouterr()

    assert first.err == "Reading transformers, once for this version of it …\n"
    assert first.out == second.out == second.err == ""


def test_terminal_gets_a_bar_that_reaches_its_end_and_goes(package, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    build_catalog(package, progress=True)
    bar = capsys.readouterr().err
    assert "Reading transformers:" in bar
    assert not bar.rstrip(" ").endswith("]")


def test_reading_the_catalog_imports_neither_transformers_nor_torch():
    code = (
        "import sys\nfrom patchlab.model.catalog import load_catalog\n"
        "assert len(load_catalog(progress=False)) > 5000\n"
        "print(sorted({'transformers', 'torch'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "[]"


def test_one_process_has_one_catalog():
    assert load_catalog() is load_catalog()
    assert catalog_room.installed_version(package_root()) == load_catalog().version
