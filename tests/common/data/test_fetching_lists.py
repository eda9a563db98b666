"""Lists of a set's files: MLCommons' lists of checksums, and the list of files of a repository."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from common.data.sources import Sources
from common.errors import DataError
from tests.common.data.remote_sets import (
    FILES,
    FIRST,
    SECOND,
    content_of,
    md5,
    pair,
    put,
    serving,
    sha256,
    source_set,
    sources_of,
)
from tests.http_server import Answer, Request, Script, Server, reply

MD5S = f"{md5(FIRST)}  a/1.bin\n{md5(SECOND)}  ./a/2.bin\n".encode()
BELOW = {f"/bucket{target}": content for target, content in FILES.items()}


def lists(official: str) -> dict[str, bytes]:
    """Make MLCommons' two lists of a set, of which one names the folder in the official store."""
    return {"/metadata/toy.uri": f"{official}/bucket/d\n".encode(), "/metadata/toy.md5": MD5S}


def listed_sources(*stores: str) -> Sources:
    """Make a set whose checksums are in a list; the last store is the official one."""
    files = [replace(file, bytes=None, checksum=None) for file in pair(stores[0]).files]
    return sources_of(source_set(*files, list_name="toy"), mlcommons=stores)


def test_lists_of_checksums_are_fetched_and_kept(run, raw):
    contents = dict(BELOW)
    with Server(serving(contents)) as server:
        contents |= lists(server.url)
        [line] = run(listed_sources(server.url))
        before = len(server.requests)
        run(listed_sources(server.url))
        run(listed_sources(server.url), check=True)
    assert before == len(server.requests) == 4
    assert line.endswith("2 files: 2 fetched now, 2 compared with a checksum")
    assert {name: content for name, content in content_of(raw).items() if name != "toy.uri"} == {
        "toy.md5": MD5S,
        "a/1.bin": FIRST,
        "a/2.bin": SECOND,
    }


@pytest.mark.parametrize("of_mirror", [True, False], ids=["mirror", "official store"])
def test_files_come_from_the_mirror(of_mirror, run, raw):
    """The lists come from the mirror, too, or from the official store if the mirror has none."""
    mirrored = dict(BELOW)
    with Server(lambda request: serving(lists(server.url))(request)) as server, Server(serving(mirrored)) as mirror:
        mirrored |= lists(server.url) if of_mirror else {}
        run(listed_sources(mirror.url, server.url))
    assert content_of(raw)["a/2.bin"] == SECOND
    assert [request.target for request in server.requests] == ([] if of_mirror else list(lists("")))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"/metadata/toy.md5": f"{md5(FIRST)}  a/1.bin\n".encode()}, r"toy\.md5: lacks a/2\.bin; delete it and run"),
        ({"/metadata/toy.md5": b"one\ntwo\n"}, r"toy\.md5, line 1: is no MD5 and path; delete it and run"),
        ({"/metadata/toy.md5": b"<html>log in</html>"}, "is a page"),
        ({"/metadata/toy.md5": b"\xff\xff\n"}, r"toy\.md5"),
        ({"/metadata/toy.uri": b"<!doctype html>"}, "is a page"),
        ({"/metadata/toy.uri": b"elsewhere"}, r"/elsewhere/a/\d\.bin: HTTP 404"),
        (
            {"/metadata/toy.md5": MD5S.replace(b"./a/2.bin", b"a/1.bin").replace(b"a/1.bin", b"a/2.bin", 1)},
            "instead of",
        ),
    ],
    ids=["short", "garbage", "page", "no text", "page as address", "other address", "swapped"],
)
def test_wrong_list_is_an_error(changed, message, run, raw):
    contents = dict(BELOW)
    with Server(serving(contents)) as server:
        contents |= lists(server.url) | changed
        with pytest.raises(DataError, match=message):
            run(listed_sources(server.url))
    assert not (raw / "a/2.bin").exists()


def entries(*contents: tuple[str, bytes], **facts: Any) -> bytes:
    """Make a page of Hugging Face's list of files."""
    return json.dumps(
        [{"type": "directory", "path": "data"}]
        + [
            {"type": "file", "path": path, "size": len(content), "lfs": {"oid": sha256(content)}, **facts}
            for path, content in contents
        ]
    ).encode()


HUB_LIST = "/api/datasets/o/r/tree/main?recursive=true"
HUB_FILES = {
    "/datasets/o/r/resolve/main/data/d%3D1/p.bin": FIRST,
    "/datasets/o/r/resolve/main/data/d%3D2/p.bin": SECOND,
}


def hub_sources(url: str) -> Sources:
    path = "datasets/o/r/resolve/main"
    tree = {"tree": "o/r", "pattern": "data/*.bin", "path": path}
    return sources_of(source_set(addresses=(f"{url}/{path}",), tree=tree, named=2), huggingface=(url,))


def hub(first: bytes, second: bytes) -> Script:
    """Make the script of a repository whose list of files has two pages."""

    def script(request: Request) -> Answer:
        if request.target == HUB_LIST:
            return reply("200 OK", first, f'Link: <{HUB_LIST}&cursor=x>; rel="next"')
        return serving({**HUB_FILES, f"{HUB_LIST}&cursor=x": second})(request)

    return script


def test_list_of_a_repository_has_two_pages(run, raw):
    other = ("README.md", b"# read me")
    with Server(hub(entries(("data/d=1/p.bin", FIRST), other), entries(("data/d=2/p.bin", SECOND)))) as server:
        [line] = run(hub_sources(server.url))
        before = len(server.requests)
        run(hub_sources(server.url))
        run(hub_sources(server.url), check=True)
    assert before == len(server.requests) == 4
    assert line.endswith("2 files: 2 fetched now, 2 compared with a checksum")
    assert content_of(raw) | {"set.files.json": b""} == {
        "data/d=1/p.bin": FIRST,
        "data/d=2/p.bin": SECOND,
        "set.files.json": b"",
    }


GOOD = entries(("data/d=1/p.bin", FIRST))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b"[]", "lists 1 files and not 2; delete it and run the command again"),
        (b"<html>", "is not the list of files that belongs there"),
        (b'{"error": "no"}', "is not the list of files that belongs there"),
        (b"[1, 2]", "is not the list of files that belongs there"),
        (entries(("data/d=2/p.bin", SECOND), size="many"), "is not the list of files that belongs there"),
        (entries(("data/d=2/p.bin", SECOND), size=None), "is not the list of files that belongs there"),
        (entries(("data/d=2/p.bin", SECOND), lfs={"oid": 5}), "is not the list of files that belongs there"),
        (entries(("data/../../p.bin", SECOND)), "is not the list of files that belongs there"),
        (entries(("data/d=2/p.bin", FIRST)), "bytes instead of 900|sha256"),
    ],
    ids=["short", "page", "object", "numbers", "size text", "no size", "checksum", "outside", "other file"],
)
def test_wrong_list_of_a_repository_is_an_error(second, message, run, raw):
    with Server(hub(GOOD, second)) as server, pytest.raises(DataError, match=message):
        run(hub_sources(server.url))
    assert not (raw.parent / "p.bin").exists()
    assert not (raw / "data/d=2/p.bin").exists()


@pytest.mark.parametrize(
    "kept",
    [b'{"data/d', b"[]", b'{"a": 1, "b": [2]}', b'{"../x": [1, null], "b": [1, null]}'],
    ids=["cut", "list", "numbers", "outside"],
)
def test_damaged_list_of_a_repository_is_named(kept, run, raw):
    put(raw, {"set.files.json": kept})
    with pytest.raises(DataError, match=r"set\.files\.json.*delete it and run the command again"):
        run(hub_sources("http://nowhere.invalid"))


def test_list_of_a_repository_is_not_fetched_to_check(run, raw):
    with Server(hub(GOOD, GOOD)) as server, pytest.raises(DataError, match="run the command without --check first"):
        run(hub_sources(server.url), check=True)
    assert server.requests == []
