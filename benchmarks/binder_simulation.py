"""What a visitor on Binder gets, without Docker: `./dev binder`.

A fresh virtual environment is filled from the files in binder/, as repo2docker would do it, and in
it the server is started and every tutorial is run from the installed wheel, offline, with the
memory of a session as the limit. Said at the end: how large the environment is, whether anything
for CUDA came along, how long the server takes to start, and the time and peak of each tutorial.

The peak is the resident memory of the server and the kernel together, which counts shared pages
twice and so is more than what a container is charged. Nothing but the standard library is needed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINDER, NOTEBOOKS = ROOT / "binder", ROOT / "notebooks"
RESULTS = ROOT / "benchmarks" / "results" / "binder.json"
LIMIT = 2_000_000_000  # bytes; a session on mybinder.org is stopped above
AIM = 1_000_000_000
STEP = 0.05  # seconds between two looks at the memory
# Nothing listens there: whoever asks a server all the same gets an error and no answer.
NOWHERE = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
)
CUDA = re.compile(r"^(nvidia|triton|cuda)", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """How a tutorial ran.

    Attributes:
        peak: Bytes, server and kernel together.
        problem: Why it did not end, "" if it did.
    """

    name: str
    seconds: float
    peak: int
    problem: str = ""


def build(folder: Path) -> Path:
    """Make the environment from the files of binder/, and return its Python."""
    wanted = (BINDER / "runtime.txt").read_text(encoding="utf-8").strip().removeprefix("python-")
    here = ".".join(map(str, sys.version_info[:2]))
    creator = sys.executable if here == wanted else shutil.which(f"python{wanted}")
    if creator is None:
        creator = sys.executable
        print(f"no Python {wanted} here; this is done with {here}")
    must([creator, "-m", "venv", str(folder)])
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    env = {**os.environ, "VIRTUAL_ENV": str(folder)}
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    pip = ["pip", "install", "--no-cache-dir", "-q"]
    must([str(python), "-m", *pip, "-r", str(BINDER / "requirements.txt")], env)
    for line in commands(BINDER / "postBuild"):
        if "--torch-backend" not in line:
            must(["bash", "-c", line], env)
        elif run(["bash", "-c", line], env):
            # uv asks PyTorch's own server; where that is out of reach, another may have the build.
            torch = line.split()[-1].strip("\"'")
            print(f"uv could not; trying {torch}+cpu")
            must([str(python), "-m", *pip, f"{torch}+cpu"], env)
    return python


def commands(script: Path) -> list[str]:
    """Return the lines of a script that do something."""
    lines = [line.strip() for line in script.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "set "))]


def packages(python: Path) -> list[str]:
    """Return the names of all installed packages."""
    said = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [package["name"] for package in json.loads(said.stdout)]


def size_of(folder: Path) -> int:
    """Return the bytes of all files below, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


@contextmanager
def server(python: Path, work: Path) -> Iterator[tuple[int, float]]:
    """Run the server as Binder starts it; yields its process id and the seconds it took."""
    runtime = work / "runtime"
    token = secrets.token_hex(16)
    command = [str(BINDER / "start"), str(python), "-m", "jupyterlab", "--no-browser"]
    command += ["--allow-root", "--ip=127.0.0.1", "--port=0", f"--ServerApp.root_dir={work}"]
    env = environment(work) | {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_TOKEN": token}
    began = time.monotonic()
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not answers(runtime / f"jpserver-{process.pid}.json", token):
            if process.poll() is not None or time.monotonic() - began > 120:
                raise SystemExit(f"no server: {(work / 'server.log').read_text()}")
            time.sleep(0.05)
        yield process.pid, time.monotonic() - began
    finally:
        process.terminate()
        process.wait()


def answers(info: Path, token: str) -> bool:
    """Tell whether the server that wrote this file serves the page of JupyterLab."""
    try:
        url = json.loads(info.read_text(encoding="utf-8"))["url"]
        with urllib.request.urlopen(f"{url}lab?token={token}", timeout=5) as response:
            return int(response.status) == 200
    except (OSError, ValueError, urllib.error.URLError):
        return False


def environment(work: Path) -> dict[str, str]:
    """Return variables under which nothing outside is asked, and nothing outside is written."""
    own = {"HF_HUB_OFFLINE": "1", "JUPYTER_PLATFORM_DIRS": "0", "HOME": str(work)}
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "XDG_CACHE_HOME")
    return {**os.environ, **own, **NOWHERE, **{name: str(work / name) for name in folders}}


def run_tutorial(python: Path, notebook: Path, work: Path, beside: int) -> Run:
    """Run a notebook whole, and stop it where a session would be stopped.

    Args:
        python: Of the environment; so the wheel is what is imported.
        notebook: A copy of the tutorial, among the files that it shows.
        work: For what is written.
        beside: The server's process id: its memory counts too.
    """
    command = [str(BINDER / "start"), str(python), "-m", "nbconvert", "--to", "notebook"]
    command += ["--execute", "--output-dir", str(work), str(notebook)]
    began, peak = time.monotonic(), 0
    log = work / f"{notebook.stem}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment(work), stdout=out, stderr=out)
    while process.poll() is None:
        # The one that drives the notebook is the browser's part on Binder, and does not count.
        tree = {pid for pid in family(process.pid) if pid != process.pid} | {*family(beside)}
        now = sum(map(resident, tree))
        peak = max(peak, now)
        if now > LIMIT:
            for pid in family(process.pid):
                os.kill(pid, 9)
            process.wait()
            problem = f"stopped above {LIMIT / 1e9:g} GB"
            return Run(notebook.stem, time.monotonic() - began, peak, problem)
        time.sleep(STEP)
    problem = "" if process.returncode == 0 else log.read_text(encoding="utf-8")[-2000:]
    return Run(notebook.stem, time.monotonic() - began, peak, problem)


def family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
    return found


def resident(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def run(command: list[str], env: dict[str, str] | None = None) -> int:
    """Run a command in the repository, shown first."""
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def must(command: list[str], env: dict[str, str] | None = None) -> None:
    """Run a command and stop if it fails."""
    if status := run(command, env):
        raise SystemExit(f"failed ({status}): {' '.join(command)}")


def report(runs: Iterable[Run]) -> None:
    """Print a line for each tutorial."""
    for done in runs:
        over = "" if done.peak <= AIM else f"  above {AIM / 1e9:g} GB"
        what = f"  FAILED: {done.problem}" if done.problem else over
        print(f"{done.name:20} {done.seconds:6.1f} s {done.peak / 1e6:8,.0f} MB{what}")


def main(names: list[str]) -> int:
    """Do all of it; names choose tutorials."""
    if not Path("/proc/self/statm").exists():
        raise SystemExit("the memory of processes is read from /proc, so this needs Linux.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="patchlab-binder-") as scratch:
        folder, work = Path(scratch) / "environment", Path(scratch) / "work"
        python = build(folder)
        built = time.monotonic() - began
        copy = shutil.copytree(NOTEBOOKS, work / "notebooks")
        cuda = [name for name in packages(python) if CUDA.match(name)]
        size = size_of(folder)
        runs = []
        with server(python, work) as (pid, start):
            idle = sum(map(resident, family(pid)))
            for notebook in sorted(copy.glob("*.ipynb")):
                if not names or any(notebook.stem.startswith(name) for name in names):
                    runs.append(run_tutorial(python, notebook, work, pid))
                    report(runs[-1:])
    print(f"environment {size / 1e9:.2f} GB, made in {built:.0f} s; for CUDA: {cuda or 'nothing'}")
    print(f"server answers after {start:.1f} s, and takes {idle / 1e6:.0f} MB by itself")
    RESULTS.parent.mkdir(exist_ok=True)
    found = {"environment": size, "built": built, "start": start, "idle": idle, "cuda": cuda}
    RESULTS.write_text(json.dumps(found | {"runs": [*map(asdict, runs)]}, indent=1) + "\n")
    return 1 if cuda or any(done.problem for done in runs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
