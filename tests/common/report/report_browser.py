"""A headless Chromium that opens a page: its picture, what it complained about, and what it asked the network for."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MEASURE = """
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll(".picture svg, img")].map(one => {
    const box = one.getBoundingClientRect();
    return {left: box.left, top: box.top, width: box.width, height: box.height,
            marks: one.querySelectorAll("path, use, text").length};
  });
  const tiles = [...document.querySelectorAll(".tiles div")].map(one => {
    const box = one.getBoundingClientRect();
    return {top: box.top, right: box.right};
  });
  const report = document.createElement("pre");
  report.id = "measured";
  report.textContent = JSON.stringify({pictures: found, tiles: tiles, scroll: document.documentElement.scrollWidth,
                                       wide: document.documentElement.clientWidth});
  document.body.append(report);
});
</script>
"""


@dataclass(frozen=True)
class Visit:
    """What came of opening a page.

    Attributes:
        console: lines that the page caused on the browser's console.
        requests: addresses of the network that were asked for.
        output: what the browser printed on standard output.
    """

    console: list[str]
    requests: list[str]
    output: str


def find_browser() -> str | None:
    """The path of a Chromium on this machine; None without one."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def visit(page: Path, folder: Path, *options: str, size: tuple[int, int] = (1280, 2600)) -> Visit:
    """Open a page with a profile in ``folder`` and no way to any host.

    Args:
        page: the file.
        folder: for the browser's own files.
        options: what to do with it, ``--screenshot=FILE`` or ``--dump-dom``: without one the browser stays open.
        size: of the window, in pixels.
    """
    browser = find_browser()
    assert browser is not None
    folder.mkdir(parents=True, exist_ok=True)
    net_log = folder / "net.json"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--disable-dev-shm-usage", "--enable-logging=stderr", "--log-level=0", f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={net_log}", f"--window-size={size[0]},{size[1]}",
        *options, page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    # The browser's own pages (chrome://) write to the console too.
    lines = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    console = [line for line in lines if "source: chrome://" not in line]
    return Visit(console, _requests(net_log), done.stdout)


def measure(page: Path, folder: Path, size: tuple[int, int] = (1280, 2600)) -> dict:
    """Places and contents of the page's pictures in the browser, from a copy that measures itself."""
    copy = folder / "measured.html"
    folder.mkdir(parents=True, exist_ok=True)
    text = page.read_text().replace("default-src", "script-src 'unsafe-inline'; default-src")
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    found = re.search(r'<pre id="measured">(.*?)</pre>', visit(copy, folder, "--dump-dom", size=size).output, re.DOTALL)
    assert found is not None, "the page never loaded"
    return json.loads(html.unescape(found[1]))


def _requests(net_log: Path) -> list[str]:
    """Addresses in a net log that a page asked for; the browser's own errands have no origin."""
    events = [event.get("params", {}) for event in json.loads(net_log.read_text())["events"]]
    asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
    return sorted(url for url in asked if re.match(r"(https?|wss?|ftp):", url))
