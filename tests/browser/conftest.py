"""Fixtures for tests in a browser: one server and one Chromium for all, a page for each test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.driven_lab import Lab, Server

# Without a sandbox and shared memory, as in a container; and nothing that looks for a network.
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def find_chromium() -> str | None:
    """Return the system's Chromium; None for playwright's own (`playwright install chromium`)."""
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (path := shutil.which(name)):
            return path
    return None


# For a module and not for the session: while it is open, playwright keeps an event loop running in
# this thread, and no test that needs a loop of its own could run after it.
@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(),
            args=CHROMIUM_ARGS,
            headless=not os.environ.get("HEADED"),
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("lab"))
    yield running
    running.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.failed_call = report.failed
    return report


@pytest.fixture
def lab(chromium, server, request):
    """A page of its own; a picture of it is kept in test-results/ if the test fails."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(30_000)
    yield Lab(page, server)
    if getattr(request.node, "failed_call", False):
        folder = Path("test-results")
        folder.mkdir(exist_ok=True)
        page.screenshot(path=folder / f"{request.node.name}.png")
    context.close()
    server.end_sessions()
