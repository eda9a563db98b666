"""The page in a headless Chromium: it renders with its pictures, complains about nothing and asks for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from report_browser import find_browser, measure, visit
from report_runs import resnet_run, write_log, write_metrics

from common.report.command import main

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
HIDDEN = 1
"""Pictures that wait behind a switch: quality over epochs."""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a run of eight ranks, all of its pictures drawn."""
    folder = tmp_path_factory.mktemp("run") / "run"
    write_log(folder / "mlperf.log", resnet_run(number_of_nodes=1, accelerators_per_node=0))  # nine tiles
    for rank in range(8):
        write_metrics(folder, rank, steps=600, seconds=640, slower=0.03 if rank == 5 else 0.0)
    output = folder.parent / "page.html"
    assert main([str(folder), "--output", str(output)]) == 0
    return output


def test_every_picture_has_a_size_and_something_in_it(page, tmp_path):
    pictures = measure(page, tmp_path)["pictures"]
    shown = [picture for picture in pictures if picture["width"] > 0]
    assert (len(pictures), len(shown)) == (6, 6 - HIDDEN)
    assert all(picture["width"] > 400 and picture["height"] > 150 and picture["marks"] > 20 for picture in shown)


@pytest.mark.parametrize(("width", "rows"), [(1300, 2), (500, 5)])
def test_the_page_fits_a_screen_and_its_tiles_fill_their_rows(page, tmp_path, width, rows):
    found = measure(page, tmp_path, size=(width, 2000))
    assert found["wide"] == width
    assert found["scroll"] <= found["wide"]
    assert len(found["tiles"]) == 9
    last_of_rows = {tile["top"]: tile["right"] for tile in found["tiles"]}
    assert len(last_of_rows) == rows
    assert max(last_of_rows.values()) - min(last_of_rows.values()) < 2


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_picture_can_be_seen(page, tmp_path, theme):
    shot = tmp_path / "shot.png"
    options = ["--force-dark-mode"] if theme == "dark" else []
    visit(page, tmp_path / "browser", f"--screenshot={shot}", *options)
    screen = Image.open(shot).convert("RGB")
    paper = sum(screen.getpixel((3, 3)))
    assert paper > 700 if theme == "light" else paper < 120
    for picture in measure(page, tmp_path / "measuring")["pictures"]:
        if picture["width"]:
            left, top = round(picture["left"]), round(picture["top"])
            region = screen.crop((left, top, left + round(picture["width"]), top + round(picture["height"])))
            colours = region.getcolors(region.width * region.height)
            background = max(count for count, _ in colours) / (region.width * region.height)
            assert len(colours) > 30
            assert 0.3 < background < 0.99


def test_the_console_stays_silent_and_nothing_is_asked_of_the_network(page, tmp_path):
    found = visit(page, tmp_path, f"--screenshot={tmp_path / 'shot.png'}")
    assert (found.console, found.requests) == ([], [])


def test_the_browser_tells_of_errors_and_requests_if_there_are_any(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://example.invalid/x.png"><script>missing()</script>')
    found = visit(bad, tmp_path, f"--screenshot={tmp_path / 'shot.png'}")
    assert found.requests == ["http://example.invalid/x.png"]
    assert any("missing is not defined" in line for line in found.console)
