"""A real browser for pages: Debian's Chromium, headless, with a temporary profile."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.require import require_package, require_program

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@contextmanager
def browser(*, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Chrome]:
    """A window of that size; ``requests`` and ``complaints`` read its requests and its console."""
    # Not in the test's own directory: the path of a socket in the profile is limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as profile:
        yield from _browse(profile, width, height, dark=dark)


def _browse(profile: str, width: int, height: int, *, dark: bool) -> Iterator[Chrome]:
    webdriver: Any = require_package("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = require_program("chromium")
    for argument in (
        "--headless=new",
        # Chromium has no sandbox as root; it only opens our own pages.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        *(["--force-dark-mode"] if dark else []),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(
        require_program("chromedriver", package="chromium-driver"), env={**os.environ, "TMPDIR": profile}
    )
    driver: Chrome = webdriver.Chrome(options=options, service=service)
    try:
        # The page that a new window opens by itself is not ours.
        driver.get("about:blank")
        for kind in ("performance", "browser"):
            driver.get_log(kind)
        yield driver
    finally:
        driver.quit()


def complaints(driver: Chrome) -> list[str]:
    """The messages on the browser's console."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Chrome) -> list[str]:
    """The addresses of all requests, including the page itself."""
    entries = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [each["params"]["request"]["url"] for each in entries if each["method"] == "Network.requestWillBeSent"]
