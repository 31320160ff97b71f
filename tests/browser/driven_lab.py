"""A real JupyterLab server and a page on it, driven as a person would and asked as a test can."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import BlockingKernelClient

SETTINGS = {
    # No first-run pop-up over the page, and no look-up of news.
    "notification": {"fetchNews": "false", "checkForUpdates": False},
    "themes": {"theme": "JupyterLab Light"},
}


class Server:
    """JupyterLab with everything it reads and writes under one folder."""

    def __init__(self, base: Path) -> None:
        self.root, self.runtime, self.base = base / "root", base / "runtime", base
        self.root.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        settings = base / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        for name, value in SETTINGS.items():
            (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(value))
        self.env = os.environ | {
            "JUPYTER_RUNTIME_DIR": str(self.runtime),
            "JUPYTER_CONFIG_DIR": str(base / "config"),
            "JUPYTER_DATA_DIR": str(base / "data"),
            "JUPYTERLAB_SETTINGS_DIR": str(base / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(base / "workspaces"),
            "IPYTHONDIR": str(base / "ipython"),
            "JUPYTER_PLATFORM_DIRS": "0",
            "JUPYTER_TOKEN": self.token,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.log_path = base / "lab.log"
        self._closing = ExitStack()
        log = self._closing.enter_context(self.log_path.open("wb"))
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        command += ["--ip=127.0.0.1", "--port=0", f"--ServerApp.root_dir={self.root}"]
        command += ["--LabApp.expose_app_in_browser=True", "--KernelManager.shutdown_wait_time=1"]
        self.process = subprocess.Popen(
            command, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.stop()
            raise

    def _wait_for_url(self) -> str:
        # The port is the system's choice; the server writes it next to its process id.
        info = self.runtime / f"jpserver-{self.process.pid}.json"
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.url = json.loads(info.read_text())["url"]
                self.api("status")
            except (OSError, ValueError, KeyError):
                time.sleep(0.1)
            else:
                return self.url
        raise RuntimeError(f"JupyterLab did not start:\n{self.log_path.read_text()}")

    def api(self, path: str, method: str = "GET") -> Any:
        """Call the server's REST interface."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            body = response.read()
        return json.loads(body) if body else None

    def write(self, name: str, cells: list[Any]) -> str:
        """Write a notebook whose cells are sources or cell nodes."""
        nodes = [nbformat.v4.new_code_cell(c) if isinstance(c, str) else c for c in cells]
        notebook = nbformat.v4.new_notebook(cells=nodes)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, self.root / name)
        return name

    def trust(self, name: str) -> None:
        """Sign a notebook, as saving it after a run does."""
        command = [sys.executable, "-m", "jupyter", "trust", str(self.root / name)]
        subprocess.run(command, check=True, env=self.env, capture_output=True)

    def ask(self, expression: str, notebook: str, timeout: float = 60) -> str:
        """Return the repr of an expression in a notebook's kernel, asked outside of the browser."""
        sessions = self.api("sessions")
        kernel = next(s["kernel"]["id"] for s in sessions if s["path"] == notebook)
        client = BlockingKernelClient(connection_file=str(self.runtime / f"kernel-{kernel}.json"))
        client.load_connection_file()
        client.start_channels()
        try:
            reply = client.execute(
                "",
                silent=True,
                store_history=False,
                user_expressions={"asked": expression},
                reply=True,
                timeout=timeout,
            )
        finally:
            client.stop_channels()
        answer = reply["content"]["user_expressions"]["asked"]
        if answer["status"] != "ok":
            raise AssertionError(f"{expression}: {answer.get('ename')}: {answer.get('evalue')}")
        return str(answer["data"]["text/plain"])

    def end_sessions(self) -> None:
        """Stop every kernel."""
        for session in self.api("sessions"):
            self.api(f"sessions/{session['id']}", "DELETE")

    def stop(self) -> None:
        """Stop the server and whatever it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(15)
        self._closing.close()


class Lab:
    """A browser page on the server, with one notebook open."""

    def __init__(self, page: Any, server: Server) -> None:
        self.page, self.server, self.notebook = page, server, ""
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, cells: list[Any] | str, name: str = "test.ipynb") -> Lab:
        """Open a notebook with these cells, or one that is there already."""
        self.notebook = cells if isinstance(cells, str) else self.server.write(name, cells)
        url = f"{self.server.url}lab/tree/{self.notebook}?token={self.server.token}&reset"
        self.page.goto(url)
        self.page.wait_for_function("() => window.jupyterapp?.restored")
        self.page.evaluate("() => window.jupyterapp.restored")
        self.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell")
        self.wait_idle()
        return self

    def wait_idle(self, timeout: float = 120_000) -> None:
        """Wait until the notebook's kernel waits."""
        status = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
        self.page.wait_for_function(f"() => {status} === 'idle'", timeout=timeout)

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Carry out a JupyterLab command and wait for its end."""
        self.page.evaluate(
            "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)",
            [name, arguments or {}],
        )

    def run_all(self) -> Lab:
        """Run all cells; returns when the last reply is there, also when a cell failed."""
        self.command("notebook:run-all-cells")
        return self

    def save(self) -> dict[str, Any]:
        """Save the notebook and return it as it is on disk."""
        self.command("docmanager:save")
        return dict(nbformat.read(self.server.root / self.notebook, as_version=4))

    def output(self, cell: int) -> Any:
        """Return the locator of a cell's output."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-OutputArea")

    def theme(self, name: str) -> None:
        """Change the theme, such as "JupyterLab Dark"."""
        self.command("apputils:change-theme", {"theme": name})
        self.page.wait_for_function("n => document.body.dataset.jpThemeName === n", arg=name)
        # A change of the theme shows the splash again.
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def ask(self, expression: str) -> str:
        """Return the repr of an expression in the notebook's kernel."""
        return self.server.ask(expression, self.notebook)

    def expect_kernel(self, expression: str, value: str, timeout: float = 20) -> None:
        """Ask until the answer is right: the page changes before the kernel has heard of it."""
        end = time.monotonic() + timeout
        while (found := self.ask(expression)) != value:
            if time.monotonic() > end:
                raise AssertionError(f"{expression} is {found}, not {value}")
            time.sleep(0.1)
