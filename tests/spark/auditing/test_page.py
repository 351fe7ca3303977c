"""The audit's page in a real browser: it opens without a network, and everything on it is visible."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plait.spark.auditing.report_files import page
from tests.spark.auditing.conftest import Audit
from tests.spark.auditing.test_defects import one_by_one
from tests.support.browser import browser, complaints, requests

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

#: In the page: elements that are invisible or wider than the window, by their text.
UNSEEN = """
return [...document.querySelectorAll('h1, h2, h3, p, svg, table')].filter(each => {
  const box = each.getBoundingClientRect();
  const scrolls = each.closest('.scroll') !== null;
  return box.width < 1 || box.height < 1 || (!scrolls && box.right > window.innerWidth + 1);
}).map(each => each.tagName + ' ' + each.textContent.slice(0, 60));
"""
#: In the page: texts of a plot that overlap or lie outside of it.
CROWDED = """
const found = [];
for (const plot of document.querySelectorAll('svg')) {
  const frame = plot.getBoundingClientRect();
  const texts = [...plot.querySelectorAll('text')].map(each => [each.textContent, each.getBoundingClientRect()]);
  for (const [text, box] of texts) {
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1) found.push(text);
    for (const [other, there] of texts) {
      if (box !== there && box.left < there.right - 1 && there.left < box.right - 1
          && box.top < there.bottom - 2 && there.top < box.bottom - 2) found.push(text + ' / ' + other);
    }
  }
}
return found;
"""


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)], ids=["wide", "narrow and dark"])
async def test_everything_on_the_page_is_visible_and_nothing_is_fetched(
    tmp_path: Path, audit: Audit, width: int, dark: bool
):
    await one_by_one(tmp_path / "data")
    report = audit(tmp_path / "data")
    report.subjects[0].hot_keys[0] = type(report.subjects[0].hot_keys[0])("<script>alert(1)</script>" * 3, 3)
    (tmp_path / "audit.html").write_text(page(report))
    address = (tmp_path / "audit.html").as_uri()
    with browser(width=width, dark=dark) as driver:
        driver.get(address)
        assert "Every promise was kept." in shown(driver)
        assert "<script>alert(1)</script>" in shown(driver)
        assert len(driver.find_elements("css selector", "svg")) >= 2
        assert driver.execute_script(UNSEEN) == []
        assert driver.execute_script(CROWDED) == []
        assert requests(driver) == [address]
        assert complaints(driver) == []


def shown(driver: Chrome) -> str:
    """The text of the page as a reader sees it."""
    text: str = driver.find_element("css selector", "body").text
    return text
