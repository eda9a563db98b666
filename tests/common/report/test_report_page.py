"""What the page says and what it must not: claims, escaping, size, files."""

from __future__ import annotations

import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import POINT, RUN_START, resnet_run, write_log, write_metrics, write_series

from common import cli
from common.errors import ConfigError
from common.report import cards
from common.report.command import main

EVIL = '<script>alert("x")</script>$\\frac{1}{0}$&amp;'


class Reader(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def read(*arguments: object) -> Reader:
    """The page that ``report`` writes for the arguments."""
    output = Path(str(arguments[0])).parent / "page.html"
    assert main([*map(str, arguments), "--output", str(output)]) == 0
    reader = Reader()
    reader.feed(output.read_text())
    assert reader.open == []
    return reader


def said(page: Reader) -> str:
    return " ".join(" ".join(page.text).split())


def a_run(folder: Path, ranks: int = 2, lines=None, **before) -> Path:
    write_log(folder / "mlperf.log", lines or resnet_run(**before))
    for rank in range(ranks):
        write_metrics(folder, rank, steps=50, seconds=640, slower=0.05 * (rank == 1))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Reader:
    """The page of one run of real data."""
    return read(a_run(tmp_path_factory.mktemp("plain") / "run"))


@pytest.fixture(scope="module")
def of_synthetic_data(tmp_path_factory) -> Reader:
    """The page of one run of synthetic data."""
    return read(a_run(tmp_path_factory.mktemp("synthetic") / "run", data_set="stand-in"))


@pytest.fixture
def undrawn(monkeypatch):
    """Pages have empty pictures: drawing takes most of the time of a report."""
    monkeypatch.setattr(cards, "to_svg", lambda figure, name: "<svg></svg>")


WITHOUT_PICTURES = pytest.mark.usefixtures("undrawn")


def test_title_is_benchmark_system_and_result(plain):
    text = said(plain)
    assert text.startswith("resnet on 8xH200: target reached in 10.82 minutes")


def test_a_single_run_is_called_no_score_and_unverified(plain):
    text = said(plain)
    assert "One run is never a score" in text
    assert "not verified by MLCommons Association" in text


@WITHOUT_PICTURES
def test_the_slowest_rank_is_named(tmp_path):
    assert "Slowest: rank 1" in said(read(a_run(tmp_path / "run", ranks=3)))


def test_synthetic_data_have_a_banner_and_no_published_results(of_synthetic_data):
    banners = [attributes for _, attributes in of_synthetic_data.elements if attributes.get("class") == "banner"]
    assert len(banners) == 1
    assert said(of_synthetic_data).count("not an MLPerf result of any division") == 1
    assert "NVIDIA" not in said(of_synthetic_data)


@WITHOUT_PICTURES
def test_custom_data_have_a_banner_and_are_of_no_division(tmp_path):
    text = said(read(a_run(tmp_path / "run", data_set="custom")))
    assert "Custom data: not an MLPerf result of any division" in text
    assert "no division" in text
    assert "NVIDIA" not in text


def test_synthetic_data_are_of_no_division(of_synthetic_data):
    text = said(of_synthetic_data)
    assert "no division" in text
    assert "closed division" not in text


@WITHOUT_PICTURES
def test_a_run_without_accelerators_is_called_one_on_a_cpu(tmp_path):
    cpu = {"submission_platform": "unset", "number_of_nodes": 1, "accelerators_per_node": 0}
    text = said(read(a_run(tmp_path / "run", **cpu)))
    assert text.startswith("resnet on a CPU: target reached")
    assert "device CPU" in text
    assert "chips 0" not in text


@WITHOUT_PICTURES
def test_a_system_that_nobody_names_is_not_named(tmp_path):
    text = said(read(a_run(tmp_path / "run", submission_platform="unset")))
    assert text.startswith("resnet: target reached")


def test_real_data_have_no_banner(plain):
    assert not [attributes for _, attributes in plain.elements if attributes.get("class") == "banner"]


def test_published_results_are_marked_with_their_round(plain):
    text = said(plain)
    assert "MLPerf Training v4.0, closed division; NVIDIA/results/h200_ngc24.04_mxnet/resnet" in text
    assert "this report: unverified, one run" in text


@WITHOUT_PICTURES
def test_a_series_shows_its_score_and_the_limit_of_its_convergence(tmp_path):
    text = said(read(write_series(tmp_path / "set", [35, 36, 35, 37, 39], [60, 61, 62, 63, 64])))
    assert "score 9.98 minutes" in text  # (568 + 577 + 651) / 3 s
    assert "below 34.31" in text


@WITHOUT_PICTURES
def test_a_comparison_states_version_division_category_and_chips(tmp_path):
    a_run(tmp_path / "a", number_of_nodes=2, accelerators_per_node=8)
    text = said(read(tmp_path / "a", a_run(tmp_path / "b", ruleset="3.1.0")))
    for name in ("version", "division", "category in the log", "chips"):
        assert name in text
    for value in ("v3.1", "v4.0", "closed", "onprem", "16", "not recorded", "unverified"):
        assert value in text


@WITHOUT_PICTURES
def test_a_comparison_shows_the_settings_that_differ(tmp_path):
    a_run(tmp_path / "a")
    other = [(k, key, 9.0 if key == "lars_opt_base_learning_rate" else v, m, t) for k, key, v, m, t in resnet_run()]
    text = said(read(tmp_path / "a", a_run(tmp_path / "b", lines=other)))
    table = text[text.index("Settings that differ") :]
    assert re.search(r"lars_opt_base_learning_rate\s+10\.5\s+9\.0", table)


@pytest.mark.parametrize("key", ["org", "submission_platform", "submission_status"])
def test_markup_in_a_log_is_shown_and_not_run(tmp_path, key):
    page = read(a_run(tmp_path / "run", **{key: EVIL}))
    assert "script" not in {name for name, _ in page.elements}
    assert EVIL in said(page)


def test_markup_in_the_name_of_a_folder_is_shown_and_not_run(tmp_path):
    name = "<img src=x onerror=alert(1)>"
    a_run(tmp_path / "b")
    page = read(tmp_path / "b", a_run(tmp_path / name))
    assert "img" not in {element for element, _ in page.elements}
    assert name in said(page)


def test_an_undrawable_name_of_a_metric_is_made_legible(tmp_path):
    name = EVIL + "\ud800\x00\n"
    lines = [(k, key, {name: v} if key == "eval_accuracy" else v, m, t) for k, key, v, m, t in resnet_run()]
    page = read(a_run(tmp_path / "run", lines=lines))
    assert "script" not in {element for element, _ in page.elements}
    assert "<script>alert" in said(page)


def test_no_attribute_points_outside_of_the_page(plain):
    for element, attributes in plain.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert (value or "").startswith("#"), (element, name, value)
            assert not (name == "style" and "url(" in (value or "") and "url(#" not in (value or ""))


def test_every_name_on_the_page_is_unique_and_found(plain):
    ids = [attributes["id"] for _, attributes in plain.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    used = {
        found for _, a in plain.elements for value in a.values() for found in re.findall(r"#([\w-]+)\)?$", value or "")
    }
    assert {name for name in used if not re.fullmatch(r"[0-9a-f]{6}", name)} <= set(ids)


def test_pictures_have_words_for_who_cannot_see_them(plain):
    pictures = [a for _, a in plain.elements if a.get("role") == "img"]
    assert len(pictures) == 7  # the budget and six pictures
    assert all(len(attributes["aria-label"] or "") > 40 for attributes in pictures)


def test_colours_follow_the_theme(tmp_path):
    a_run(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    body = (tmp_path / "run_report.html").read_text().partition("</style>")[2]
    assert "var(--c0)" in body
    assert not re.search(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", body)


@WITHOUT_PICTURES
def test_a_log_alone_makes_a_page_that_says_what_is_missing(tmp_path):
    text = said(read(write_log(tmp_path / "result_0.txt", resnet_run())))
    assert "Without metrics_rank*.jsonl, the time of training cannot be divided further." in text
    assert "There are no step metrics" in text


@WITHOUT_PICTURES
def test_the_throughput_of_a_log_alone_is_the_logs_own(tmp_path):
    stats = [(POINT, "tracked_stats", {"throughput": 63_000.0}, {"step": 1}, 100 * n) for n in range(1, 4)]
    text = said(read(write_log(tmp_path / "result_0.txt", [*resnet_run()[:-1], *stats, resnet_run()[-1]])))
    assert "Throughput as in the log, in the unit of the program that wrote it." in text
    assert "63,000" in text


def test_the_loss_of_a_log_alone_is_the_logs_own(tmp_path):
    losses = [(POINT, "train_loss", 7.0 - n, {"epoch_num": n}, 100 * n) for n in range(1, 4)]
    text = said(read(write_log(tmp_path / "result_0.txt", [*resnet_run()[:-1], *losses, resnet_run()[-1]])))
    assert "training loss" in text
    assert "contain the training loss" not in text


@WITHOUT_PICTURES
def test_a_refused_log_has_no_time_beside_published_ones(tmp_path):
    text = said(read(a_run(tmp_path / "run", resumed_from="checkpoints/step_00000090")))
    assert "10.82 minutes, log refused" in text
    assert "the run was resumed (resumed_from): a resumed run is not scored" in text
    assert "There is no time that counts" in text


@WITHOUT_PICTURES
def test_a_set_that_is_too_small_says_why_it_has_no_score(tmp_path):
    text = said(read(write_series(tmp_path / "set", [35, 36, 35], [60, 61, 62])))
    assert "3 runs, no score" in text
    assert "needs 5 runs, these are 3" in text


@WITHOUT_PICTURES
def test_a_comparison_has_one_box_of_step_times_for_each_set(tmp_path):
    one = write_series(tmp_path / "one", [35, 36], [60, 61])
    other = write_series(tmp_path / "other", [35, 36], [60, 61])
    assert "Distribution of step times in milliseconds of 2 runs" in str(read(one, other).elements)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(resnet_run()[:-1], id="killed"),
        pytest.param([line for line in resnet_run() if line[1] not in ("eval_accuracy", "run_stop")], id="unevaluated"),
        pytest.param([line for line in resnet_run() if "block" not in line[1]], id="without blocks"),
        pytest.param([line for line in resnet_run() if line[1] != "global_batch_size"], id="without a batch"),
        pytest.param([(*line[:4], min(line[4], 0)) for line in resnet_run()], id="in no time"),
        pytest.param([(k, key, "high" if key == "eval_accuracy" else v, m, t) for k, key, v, m, t in resnet_run()],
                     id="quality in words"),
    ],
)  # fmt: skip
def test_an_odd_log_still_makes_a_page(tmp_path, lines):
    assert "resnet" in said(read(a_run(tmp_path / "run", lines=lines)))


def test_metrics_without_figures_still_make_a_page(tmp_path):
    folder = a_run(tmp_path / "run", ranks=0)
    (folder / "metrics_rank0.jsonl").write_text(f'{{"time": {RUN_START + 5}}}\n' * 3)
    assert "resnet" in said(read(folder))


def test_a_run_of_many_ranks_and_steps_stays_small(tmp_path):
    write_log(tmp_path / "run" / "mlperf.log", resnet_run())
    for rank in range(32):
        write_metrics(tmp_path / "run", rank, steps=2_000, seconds=640)
    assert main([str(tmp_path / "run")]) == 0
    assert (tmp_path / "run_report.html").stat().st_size < 3_000_000


@WITHOUT_PICTURES
def test_the_page_lies_beside_the_first_run(tmp_path, capsys):
    a_run(tmp_path / "runs" / "a", ranks=0)
    a_run(tmp_path / "b", ranks=0)
    main([str(tmp_path / "runs" / "a")])
    main([str(tmp_path / "runs" / "a"), str(tmp_path / "b")])
    written = [tmp_path / "runs" / "a_report.html", tmp_path / "runs" / "a_comparison.html"]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
    assert all(path.is_file() for path in written)


@WITHOUT_PICTURES
def test_pictures_are_whole_pngs_under_their_names(tmp_path):
    main([str(a_run(tmp_path / "run")), "--png", str(tmp_path / "png")])
    names = {
        "time_budget", "quality_over_time", "quality_over_progress", "throughput", "step_times", "convergence",
        "published",
    }  # fmt: skip
    assert {path.stem for path in (tmp_path / "png").iterdir()} == names
    for path in (tmp_path / "png").iterdir():
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert min(struct.unpack(">II", data[16:24])) > 200


@WITHOUT_PICTURES
def test_two_sets_have_pictures_of_their_own(tmp_path):
    one = write_series(tmp_path / "one", [35, 36], [60, 61])
    other = write_series(tmp_path / "other", [35, 36], [60, 61])
    main([str(one), str(other), "--png", str(tmp_path / "png")])
    assert {"times_1.png", "times_2.png"} <= {path.name for path in (tmp_path / "png").iterdir()}


def test_a_page_that_cannot_be_written_is_one_message(tmp_path):
    a_run(tmp_path / "run", ranks=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is no folder: name another file"):
        main([str(tmp_path / "run"), "--output", str(tmp_path / "file" / "page.html")])


def test_a_ruleset_that_does_not_accept_the_benchmark_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"does not accept resnet"):
        main([str(a_run(tmp_path / "run", ranks=0)), "--ruleset", "5.0.0"])


def test_the_command_line_prints_one_message_for_a_missing_run(tmp_path, capsys):
    assert cli.run(["report", str(tmp_path / "nowhere")]) == 3
    assert capsys.readouterr().err.strip().count("\n") == 0
