"""The download of whole sets: what counts as present, what is repaired, and the state that a run leaves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.data.fetching import LOCK, described
from common.data.preparation import locked
from common.data.sources import RemoteFile
from common.data.synthetic import MARKER
from common.errors import ConfigError, DataError
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
from tests.http_server import Answer, Request, Server, reply, stored


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


def test_failed_transfer_keeps_the_received_bytes(run, raw, client):
    with Server(serving({"/d/a/1.bin": FIRST})) as server, pytest.raises(DataError, match=r"2\.bin: HTTP 404"):
        run(pair(server.url))
    client.stopped.clear()
    with Server(serving(FILES)) as server:
        run(pair(server.url))
    assert content_of(raw) == {"a/1.bin": FIRST, "a/2.bin": SECOND}


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
