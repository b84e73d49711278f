"""A real browser without a screen: Debian's Chromium, driven by selenium."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import debian
import pytest

PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""The Debian package that each comes from."""

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def provide() -> None:
    """Make sure that the browser is there, by apt where that is needed.

    Else skip the test; with CI=true it fails.
    """
    if all(map(shutil.which, PROGRAMS)):
        return
    wrong = debian.install(*PROGRAMS.values())
    if all(map(shutil.which, PROGRAMS)):
        return
    why = f"no chromium and chromedriver here: {wrong}"
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


class Browser:
    """An open browser.

    Args:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int, scheme: str) -> None:
        """Open a page as a screen of some width shows it, ``light`` or ``dark``."""
        tell = self.driver.execute_cdp_cmd
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        tell("Emulation.setEmulatedMedia", {"features": media})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tell("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get_log("performance")  # forget what was asked before
        self.driver.get(page.absolute().as_uri())

    def ask(self, script: str, *values: object) -> Any:
        """Run JavaScript in the page, and return what it returns."""
        return self.driver.execute_script(script, *values)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Write a picture of the page, PNG."""
        asked = {"captureBeyondViewport": whole}
        if whole:
            height = self.ask("return document.documentElement.scrollHeight")
            width = self.ask("return window.innerWidth")
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            asked["clip"] = clip
        told = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)
        file.write_bytes(base64.b64decode(told["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for, its own among them."""
        told = (json.loads(it["message"]) for it in self.driver.get_log("performance"))
        return [
            it["message"]["params"]["request"]["url"]
            for it in told
            if it["message"]["method"] == "Network.requestWillBeSent"
            and not it["message"]["params"]["request"]["url"].startswith("data:")
        ]


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Open a browser, with an empty folder for what it keeps."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    service = Service(executable_path=str(shutil.which("chromedriver")))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
