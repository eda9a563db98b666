"""The download of whole sets: what counts as present, what is repaired, lists of checksums, archives, and the state."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.data.download import Client
from common.data.fetching import LOCK, Download, described
from common.data.preparation import locked
from common.data.sources import RemoteFile, Sources, SourceSet
from common.data.synthetic import MARKER
from common.errors import ConfigError, DataError
from tests.http_server import Answer, Request, Script, Server, reply, stored

FIRST, SECOND = b"first file" * 90, b"second file" * 90
FILES = {"/d/a/1.bin": FIRST, "/d/a/2.bin": SECOND}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def serving(contents: Mapping[str, bytes]) -> Script:
    """Make the script of a server that has these files."""

    def script(request: Request) -> Answer:
        content = contents.get(request.target)
        return reply("404 Not Found") if content is None else stored(content)(request)

    return script


def source_set(*files: RemoteFile, **changes: Any) -> SourceSet:
    known = SourceSet(
        name="set",
        what="numbers",
        licence="ask nicely",
        seen="2026-11",
        bytes=None,
        files=files,
        addresses=files[0].urls if files else ("http://nowhere.invalid",),
        account=None,
        folder="",
        beside=None,
        instead={},
        unpack={},
        contents=(),
        list_name=None,
        md5s=None,
        tree=None,
        named=0,
        choice=None,
        optional=False,
    )
    return replace(known, **changes)


def pair(url: str, **changes: Any) -> SourceSet:
    """Make a set of two files, of which the second has a published MD5."""
    return source_set(
        RemoteFile("a/1.bin", (f"{url}/d/a/1.bin",), "ask nicely", len(FIRST)),
        RemoteFile("a/2.bin", (f"{url}/d/a/2.bin",), "ask nicely", len(SECOND), f"md5:{md5(SECOND)}"),
        **changes,
    )


def sources_of(*sets: SourceSet, **stores: tuple[str, ...]) -> Sources:
    return Sources("toy", {item.name: item for item in sets}, 0, stores)


def put(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, without those that ``download`` keeps for itself."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".download")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "raw"


@pytest.fixture
def run(client: Client, raw: Path) -> Any:
    """A function that downloads to ``raw`` and returns the lines that the command prints."""

    def download(*sets: SourceSet | Sources, check: bool = False, chosen: tuple[str, ...] = ()) -> list[str]:
        sources = sets[0] if isinstance(sets[0], Sources) else sources_of(*sets)  # type: ignore[arg-type]
        return list(Download(sources, raw, 2, check, client).run(chosen))

    return download


def test_missing_files_are_fetched(run, raw):
    with Server(serving(FILES)) as server:
        lines = run(pair(server.url))
        assert run(pair(server.url)) == [
            f"{raw}: set, 2 files: 1 compared with a checksum, 1 without a published checksum"
        ]
    assert lines == [f"{raw}: set, 2 files: 2 fetched now, 1 compared with a checksum, 1 without a published checksum"]
    assert content_of(raw) == {"a/1.bin": FIRST, "a/2.bin": SECOND}
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("present", "changes"),
    [
        ({"a/1.bin": FIRST, "a/2.bin": SECOND}, {}),
        ({"x/y/a/1.bin": FIRST, "z/a/2.bin": SECOND}, {}),
        ({"a/1.bin": FIRST, "two/inner": b"x", "three": b"y"}, {"instead": {"a/2.bin": ("two", "three")}}),
        ({"a/1.bin": FIRST, "deep/two/inner": b"x"}, {"instead": {"a/2.bin": ("two",)}}),
    ],
    ids=["as named", "nested", "others instead", "nested folder instead"],
)
def test_files_count_as_present(present, changes, run, raw):
    put(raw, present)
    with Server(serving(FILES)) as server:
        assert "fetched" not in run(pair(server.url, **changes))[0]
    assert server.requests == []
    assert content_of(raw) == present


@pytest.mark.parametrize("name", ["a/1.json", "x/a/1.json"])
def test_unpacked_gzip_counts_as_present(name, run, raw):
    put(raw, {name: b"unpacked"})
    with Server(serving({})) as server:
        run(source_set(RemoteFile("a/1.json.gz", (f"{server.url}/1.json.gz",), "ask nicely", 7, "md5:00000000")))
    assert server.requests == []


@pytest.mark.parametrize(
    "other", ["1.bin", "b/1.bin", "ba/1.bin", ".git/a/1.bin", "x.partial/a/1.bin", "a/1.bin.partial", "a/1.bin.gz"]
)
def test_other_files_do_not_count(other, run, raw):
    put(raw, {other: FIRST, "a/2.bin": SECOND})
    with Server(serving(FILES)) as server:
        run(pair(server.url))
    assert [request.target for request in server.requests] == ["/d/a/1.bin"]
    assert (raw / "a/1.bin").read_bytes() == FIRST


def test_file_goes_beside_the_others_of_its_set(run, raw):
    put(raw, {"processed/a/1.bin": FIRST})
    with Server(serving(FILES)) as server:
        run(pair(server.url))
    assert content_of(raw) == {"processed/a/1.bin": FIRST, "processed/a/2.bin": SECOND}


WRONG = {
    "size": ({"a/1.bin": FIRST[:-1]}, "899 bytes instead of 900"),
    "MD5": ({"a/2.bin": SECOND[::-1]}, rf"md5 \w+ instead of {md5(SECOND)}"),
    "page": ({"a/1.bin": b"<html>Please log in".ljust(900)}, "is a page or a pointer"),
    "nested": ({"x/a/2.bin": SECOND[::-1]}, "md5"),
}


@pytest.mark.parametrize(("wrong", "fault"), WRONG.values(), ids=list(WRONG))
def test_wrong_file_is_fetched_again(wrong, fault, run, raw):
    put(raw, wrong)
    with Server(serving(FILES)) as server, pytest.raises(DataError, match=rf"{fault}.*: run .* without --check$"):
        run(pair(server.url), check=True)
    assert server.requests == []
    assert content_of(raw) == wrong
    with Server(serving(FILES)) as server:
        line, _ = run(pair(server.url))
    assert line.startswith(f"{raw}/{next(iter(wrong))} ")
    assert line.endswith(": it is fetched again")
    assert sorted(content_of(raw).values()) == sorted(FILES.values())


@pytest.mark.parametrize(("wrong", "fault"), WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
def test_wrong_file_that_comes_by_hand_is_named(wrong, fault, check, run, raw):
    put(raw, wrong)
    files = tuple(replace(file, urls=()) for file in pair("").files)
    with pytest.raises(DataError, match=rf"{next(iter(wrong))} .*{fault}.*: delete and fetch again \(ask nicely\)"):
        run(source_set(*files), check=check)
    assert content_of(raw) == wrong


def test_folder_in_the_place_of_a_file_is_named(run, raw):
    put(raw, {"a/1.bin/inner": FIRST, "a/2.bin": SECOND})
    with Server(serving(FILES)) as server, pytest.raises(DataError, match=r"a/1\.bin is a folder and no file"):
        run(pair(server.url))
    assert server.requests == []
    assert sorted(content_of(raw)) == ["a/1.bin/inner", "a/2.bin"]


def test_file_in_the_place_of_the_raw_folder_is_left_alone(run, raw):
    raw.write_bytes(FIRST)
    with pytest.raises(DataError, match=f"{raw} is no folder; give another --raw-dir"):
        run(pair("http://nowhere.invalid"))
    assert raw.read_bytes() == FIRST


def test_file_that_is_wrong_again_is_an_error(run, raw):
    put(raw, {"a/1.bin": FIRST, "a/2.bin": SECOND[::-1]})
    with (
        Server(serving({"/d/a/2.bin": SECOND[1:] + b"x"})) as server,
        pytest.raises(DataError, match=r"md5 \w+ instead"),
    ):
        run(pair(server.url))
    assert content_of(raw)["a/2.bin"] == SECOND[::-1]


def test_check_names_missing_files_and_changes_nothing(run, raw):
    put(raw, {"a/1.bin": FIRST})
    with Server(serving(FILES)) as server, pytest.raises(DataError, match=r"lacks files:\n  set: a/2\.bin$"):
        run(pair(server.url), check=True)
    assert server.requests == []
    assert [path.name for path in raw.rglob("*")] == ["a", "1.bin"]


def test_check_of_a_complete_folder_changes_nothing(run, raw):
    put(raw, {"a/1.bin": FIRST, "a/2.bin": SECOND})
    assert run(pair("http://nowhere.invalid"), check=True) == [
        f"{raw}: set, 2 files: 1 compared with a checksum, 1 without a published checksum"
    ]
    assert sorted(path.name for path in raw.rglob("*")) == ["1.bin", "2.bin", "a"]


def test_check_of_no_folder_makes_none(run, raw):
    with pytest.raises(DataError, match=r"lacks files:\n  set: a/1\.bin, a/2\.bin$"):
        run(pair("http://nowhere.invalid"), check=True)
    assert not raw.exists()


def test_sets_by_hand_print_their_steps_after_the_others(run, raw):
    by_hand = source_set(
        RemoteFile("h/x.tar", (), "for members", 1234, "md5:12345678"),
        RemoteFile("h/y.tar", (), "for members"),
        name="hand",
        what="pictures",
        licence="for members",
        account="sign the form, then\nfetch --to {raw_dir}/h\n",
    )
    with Server(serving(FILES)) as server, pytest.raises(DataError) as raised:
        run(by_hand, pair(server.url))
    assert str(raised.value).splitlines() == [
        f"{raw} lacks files that have to be fetched by hand:",
        "  pictures (for members):",
        "    h/x.tar  1,234 bytes  md5:12345678",
        "    h/y.tar",
        "    sign the form, then",
        f"    fetch --to {raw}/h",
    ]
    assert content_of(raw) == {"a/1.bin": FIRST, "a/2.bin": SECOND}


def test_unknown_set_is_an_error(run):
    with pytest.raises(ConfigError, match="--sets nothing: unknown; the sets are set"):
        run(pair(""), chosen=("nothing",))


def test_optional_set_comes_only_by_name(run, raw):
    with Server(serving(FILES)) as server:
        optional = pair(server.url, optional=True)
        assert run(optional) == []
        assert content_of(raw) == {}
        run(optional, chosen=("set",))
    assert len(content_of(raw)) == 2


@pytest.mark.parametrize(("present", "expected"), [({}, "one"), ({"b.bin": b"b"}, "two")], ids=["first", "present"])
def test_of_a_choice_the_existing_set_is_used(present, expected, run, raw):
    put(raw, present)
    with Server(stored(b"a")) as server:
        sets = [
            source_set(RemoteFile(f"{name[0]}.bin", (server.url,), "free", 1), name=set_name, choice="form")
            for set_name, name in {"one": "a", "two": "b"}.items()
        ]
        assert [line.partition(": ")[2].partition(",")[0] for line in run(*sets)] == [expected]


def test_set_goes_beside_another(run, raw):
    with Server(serving(FILES | {"/label": b"label"})) as server:
        beside = source_set(RemoteFile("a/label", (f"{server.url}/label",), "free", 5), name="label", beside="set")
        with pytest.raises(DataError, match="label: the files of set have to be there first"):
            run(beside, pair(server.url))
        put(raw, {"x/a/1.bin": FIRST})
        run(beside, pair(server.url))
    assert set(content_of(raw)) == {"x/a/1.bin", "x/a/2.bin", "x/a/label"}


def test_synthetic_data_are_left_alone(run, raw):
    put(raw, {MARKER: b""})
    with pytest.raises(DataError, match="holds synthetic data"):
        run(pair(""))


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


def test_two_downloads_into_one_folder_are_refused(run, raw):
    raw.mkdir()
    with Server(serving(FILES)) as server:
        with locked(raw, LOCK), pytest.raises(DataError, match=f"another process is downloading to {raw}"):
            run(pair(server.url))
        assert server.requests == []
        run(pair(server.url))
    assert len(content_of(raw)) == 2


@pytest.mark.parametrize(("free", "enough"), [(1889, False), (1890, True)], ids=["too little", "enough"])
def test_free_space_is_checked_before_the_first_byte(free, enough, run, raw, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    with Server(serving(FILES)) as server:
        if enough:
            run(pair(server.url))
        else:
            with pytest.raises(DataError, match=r"needs .* GB more; its disk has"):
                run(pair(server.url))
    assert len(server.requests) == (2 if enough else 0)


@pytest.mark.parametrize(("name", "mode", "times"), [("d.tar", "w", 2), ("d.tar.gz", "w:gz", 3)])
def test_an_archive_needs_space_for_itself_and_its_files(name, mode, times, run, raw, monkeypatch):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        member = tarfile.TarInfo("d/1.bin")
        member.size = len(FIRST)
        tar.addfile(member, io.BytesIO(FIRST))
    archive = stream.getvalue()
    with Server(serving({f"/{name}": archive})) as server:
        files = RemoteFile(name, (f"{server.url}/{name}",), "ask nicely", len(archive))
        source = source_set(files, unpack={name: {"d": "d"}})
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=times * len(archive) - 1))
        with pytest.raises(DataError, match=r"needs .* GB more; its disk has"):
            run(source)
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=times * len(archive)))
        run(source)
    assert content_of(raw)["d/1.bin"] == FIRST


def test_failed_transfer_keeps_the_received_bytes(run, raw, client):
    with Server(serving({"/d/a/1.bin": FIRST})) as server, pytest.raises(DataError, match=r"2\.bin: HTTP 404"):
        run(pair(server.url))
    client.stopped.clear()
    with Server(serving(FILES)) as server:
        run(pair(server.url))
    assert content_of(raw) == {"a/1.bin": FIRST, "a/2.bin": SECOND}


def tar_of(members: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """Make a ``.tar.gz`` of files, or of members of another kind."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo()
    member.type, member.linkname = kind, target
    return member


SPEECH = {
    "Speech/train/1.flac": b"one",
    "Speech/train/x/2.flac": b"two",
    "Speech/BOOKS.TXT": b"no",
    "Speech/._a": b"no",
}


def archive(url: str, **changes: Any) -> SourceSet:
    """Make a set of one archive, of which one folder is unpacked under another name."""
    return source_set(
        RemoteFile("speech.tar.gz", (f"{url}/s",), "free"),
        **({"unpack": {"speech.tar.gz": {"train": "out"}}, "instead": {"speech.tar.gz": ("out",)}} | changes),
    )


def test_archive_is_unpacked_and_no_longer_needed(run, raw):
    packed = tar_of(SPEECH)
    with Server(serving({"/s": packed})) as server:
        lines = run(archive(server.url))
        (raw / "speech.tar.gz").unlink()
        run(archive(server.url))
    assert lines[0] == f"{raw}/speech.tar.gz: unpacked to out; the archive is no longer needed"
    assert content_of(raw) == {"out/1.flac": b"one", "out/x/2.flac": b"two"}
    assert len(server.requests) == 1


def test_unpacking_that_was_cut_off_starts_again(run, raw):
    put(raw, {"speech.tar.gz": tar_of(SPEECH), "speech.tar.gz.unpacked.partial/out/0.flac": b"old"})
    run(archive("http://nowhere.invalid"))
    assert {name for name in content_of(raw) if name != "speech.tar.gz"} == {"out/1.flac", "out/x/2.flac"}


def test_check_unpacks_nothing(run, raw):
    put(raw, {"speech.tar.gz": tar_of(SPEECH)})
    run(archive("http://nowhere.invalid"), check=True)
    assert list(content_of(raw)) == ["speech.tar.gz"]


@pytest.mark.parametrize(
    "packed",
    [
        tar_of({**SPEECH, "Speech/train/3": link(tarfile.SYMTYPE, "/etc/passwd")}),
        tar_of({**SPEECH, "Speech/train/3": link(tarfile.LNKTYPE, "Speech/train/1.flac")}),
        tar_of({**SPEECH, "Speech/train/3": link(tarfile.CHRTYPE, "")}),
        tar_of({**SPEECH, "Speech/train/../../../3": b"three"}),
        tar_of({**SPEECH, "Speech/train/1.flac/3": b"three"}),
        tar_of({"Speech/test/1.flac": b"one"}),
        tar_of(SPEECH)[:-20],
        tar_of(SPEECH)[:10],
        b"\x1f\x8bno gzip",
    ],
    ids=["link", "hard link", "device", "outside", "below a file", "no folder", "cut", "cut early", "no gzip"],
)
def test_archive_that_cannot_be_unpacked_is_named(packed, run, raw):
    put(raw, {"speech.tar.gz": packed})
    with pytest.raises(DataError, match=r"speech\.tar\.gz.*(again)"):
        run(archive("http://nowhere.invalid"))
    assert not (raw / "out").exists()
    assert not (raw.parent / "3").exists()


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"two", None), (b"owt", "md5"), (None, "is missing")],
    ids=["right", "wrong", "missing"],
)
def test_unpacked_files_are_compared(content, fault, run, raw):
    put(raw, {"out/1.flac": b"one", "md5sums": f"{md5(b'one')}  1.flac\n{md5(b'two')}  x/2.flac\n".encode()})
    if content is not None:
        put(raw, {"out/x/2.flac": content})
    sums = archive("http://nowhere.invalid", md5s=("md5sums", "out"))
    if fault is None:
        run(sums)
        return
    with pytest.raises(DataError, match=rf"2\.flac.*{fault}.*: delete the unpacked folder and run the command again"):
        run(sums)


def rewritten(path: Path, content: bytes) -> None:
    """Change a file of which size and time stay the same, as a fault of the disk would."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_second_run_reads_no_file_again_and_check_does(run, raw):
    with Server(serving(FILES)) as server:
        run(pair(server.url))
        rewritten(raw / "a/2.bin", SECOND[::-1])
        run(pair(server.url))
        assert len(server.requests) == 2
        with pytest.raises(DataError, match=r"2\.bin has md5"):
            run(pair(server.url), check=True)


def test_existing_files_are_read_once(run, raw):
    put(raw, {"a/1.bin": FIRST, "a/2.bin": SECOND})
    run(pair("http://nowhere.invalid"))
    rewritten(raw / "a/2.bin", SECOND[::-1])
    assert len(run(pair("http://nowhere.invalid"))) == 1


def test_file_of_another_time_is_read_again(run, raw):
    with Server(serving(FILES)) as server:
        run(pair(server.url))
        rewritten(raw / "a/2.bin", SECOND[::-1])
        os.utime(raw / "a/2.bin", ns=(1, 1))
        assert len(run(pair(server.url))) == 2
    assert (raw / "a/2.bin").read_bytes() == SECOND


@pytest.mark.parametrize(
    "state",
    [b"{", b"[]", b'{"a/2.bin": null, "a/1.bin": 3}', b'{"a/2.bin": {}, "a/1.bin": [1]}', b"\xff"],
    ids=["cut", "list", "numbers", "short", "no text"],
)
def test_damaged_state_is_no_state(state, run, raw):
    put(raw, {"a/1.bin": FIRST, "a/2.bin": SECOND, ".download.json": state})
    run(pair("http://nowhere.invalid"))
    assert set(json.loads((raw / ".download.json").read_text())) == {"a/1.bin", "a/2.bin"}


def test_checksum_that_only_the_server_stated_is_kept(run, raw):
    def script(request: Request) -> Answer:
        if request.target == "/f":
            return reply("302 Found", b"", "Location: /g", f'X-Linked-Etag: "{sha256(FIRST)}"')
        return stored(FIRST)(request)

    with Server(script) as server:
        file = source_set(RemoteFile("f.bin", (f"{server.url}/f",), "free"))
        run(file)
        rewritten(raw / "f.bin", FIRST[::-1])
        with pytest.raises(DataError, match=f"sha256 .* instead of {sha256(FIRST)}"):
            run(file, check=True)


def test_list_of_sets_needs_no_network():
    by_hand = source_set(RemoteFile("h.tar", (), "for members"), name="hand", account="sign {raw_dir}", optional=True)
    assert list(described(sources_of(pair("http://nowhere.invalid"), by_hand))) == [
        "set (needed): numbers; 2 files, 1.89e-06 GB",
        "  licence: ask nicely; address last seen 2026-11",
        "  http://nowhere.invalid/d/a/1.bin/",
        f"    a/1.bin  {len(FIRST)} bytes",
        f"    a/2.bin  {len(SECOND)} bytes  md5:{md5(SECOND)}",
        "hand (only with --sets): numbers; 1 files, size unknown",
        "  licence: ask nicely; address last seen 2026-11",
        "  sign RAW_DIR",
        "    h.tar",
    ]
