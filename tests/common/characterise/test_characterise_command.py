"""The command ``characterise``: its page and JSON of two workloads on a CPU, and wrong arguments."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_workloads import characterised, figures, kernels

from common import cli
from common.characterise import command
from common.characterise.observations import observations
from common.characterise.page import page
from common.errors import ConfigError
from common.measure.jobs import Job
from common.measure.table import MeasuredCopy


class Parsed(HTMLParser):
    """Headings, verdicts and tables of a page.

    Attributes:
        tables: caption to the rows of each table.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.chips: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._rows: list[list[str]] = []
        self._into: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        classes = dict(attrs).get("class") or ""
        if tag in ("th", "td", "h2", "caption") or "chip" in classes:
            self._into.append("")
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])

    def handle_endtag(self, tag):
        if tag in ("th", "td") and self._into:
            self._rows[-1].append(self._into.pop())
        elif tag == "h2":
            self.headings.append(self._into.pop())
        elif tag == "caption":
            self.tables[self._into.pop()] = self._rows
        elif tag == "span" and self._into and self._into[-1] in ("confirmed", "not confirmed", "not measured here"):
            self.chips.append(self._into.pop())

    def handle_data(self, data):
        self.text += data
        if self._into:
            self._into[-1] += data


@pytest.mark.slow
def test_two_demos_on_a_cpu_are_compared_on_one_page(tmp_path: Path):
    words = [
        "characterise",
        "dlrm",
        "llama31_8b",
        "--scale",
        "test",
        "--variants",
        "precision",
        "--output",
        str(tmp_path),
    ]
    cpu = ["--override", "device=cpu", "--override", "bench.steps=1", "--override", "bench.warmup_steps=0"]
    assert cli.run([*words, *cpu]) == 0
    text = (tmp_path / "characterisation.html").read_text()
    found = json.loads((tmp_path / "characterisation.json").read_text())
    assert list(found["workloads"]) == ["dlrm", "llama31_8b"]
    parsed = Parsed(text)
    assert parsed.headings[-2:] == ["dlrm", "llama31_8b"]
    assert parsed.chips == [each["verdict"] for each in found["observations"]]
    head, *rows = parsed.tables["Workloads side by side"]
    assert head == ["", "dlrm", "llama31_8b"]
    cells = {row[0]: row[1:] for row in rows}
    for column, name in enumerate(("dlrm", "llama31_8b")):
        own = found["workloads"][name]
        assert own["failures"] == {}
        gain = own["gains"]["bf16 over fp32"]["value"]
        assert cells["16 bits over fp32"][column] == f"{gain:.2f}"
        assert own["roofline"]["share"] is None
        assert sum(own["roofline"]["mix"].values()) == pytest.approx(1.0)
        longest = parsed.tables[f"{name}: the 10 largest operators of a step"][1]
        assert longest[0] == max(own["roofline"]["kernels"], key=lambda each: each["ms"])["kernel"]
        assert own["by_gpus"]["1"]["host_cores"]["value"] > 0
    assert set(cells["CUDA graphs over eager"]) == {"not measured: not requested (--variants)"}
    assert set(cells["FP8 over fp32"]) == {"not measured: this needs a GPU"}
    assert set(cells["step's share of its roofline"]) == {
        "not measured: the rates of this machine are unknown (--system)"
    }
    mix = {name: found["workloads"][name]["roofline"]["mix"] for name in found["workloads"]}
    assert {"aten.index_add_"} <= mix["dlrm"].keys() - mix["llama31_8b"].keys()
    assert not re.search(r'(src|href)="|https?://', text)


def test_a_failed_variant_is_on_the_page_with_its_error():
    failed = {("", 1): figures(100.0, kernels=kernels({"gemm": 1.0})), ("fp32", 1): "exit code 1: out of memory <8 GB>"}
    workloads = [characterised("bert", failed)]
    parsed = Parsed(page(workloads, observations(workloads), "", "mlperf-suite characterise"))
    assert parsed.tables["bert: failed measurements"][1] == ["bert-1-fp32", "exit code 1: out of memory <8 GB>"]
    cells = {row[0]: row[1:] for row in parsed.tables["Workloads side by side"]}
    assert cells["16 bits over fp32"] == ["failed, see the error below"]
    assert len(parsed.chips) == 6


def test_a_workload_without_any_measurement_has_a_page():
    workloads = [characterised("bert", {("", 1): "exit code 1: no GPU"})]
    parsed = Parsed(page(workloads, observations(workloads), "", "mlperf-suite characterise"))
    assert set(parsed.chips) == {"not measured here"}
    assert parsed.tables["bert: failed measurements"][1] == ["bert-1", "exit code 1: no GPU"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "characterise: no benchmark 'nothing'"),
        (["resnet", "dlrm", "--scale", "2xH200"], "characterise: dlrm has no scale 2xH200; it has "),
        (["--scale", "7xH200"], "characterise: no benchmark has a scale 7xH200"),
        (["resnet", "--scale", "demo", "--seconds", "0"], "characterise: --seconds=0: expected seconds"),
        (["resnet", "--scale", "demo", "--system", "h200"], "--system h200: CPU ranks replace GPUs here"),
    ],
)
def test_a_wrong_argument_is_one_error(words, message, capsys):
    assert cli.run(["characterise", *words, "--override", "device=cpu"]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("system", "message"),
    [("auto", "system auto has no section hardware"), ("none", "--system none: unknown; the systems are")],
)
def test_a_system_without_rates_is_one_error(system, message, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cli.run(["characterise", "resnet", "--scale", "demo", "--system", system]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


def test_rates_of_another_gpu_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    other = [MeasuredCopy(Job("resnet", 1, "demo", False), figures(100.0, device="NVIDIA A100"))]
    monkeypatch.setattr(command.Node, "measure", lambda node, jobs, within: other)
    words = ["characterise", "resnet", "--scale", "demo", "--system", "h200", "--output", str(tmp_path)]
    assert cli.run(words) == ConfigError.exit_code
    assert "--system h200: its rates are of NVIDIA H200, this is NVIDIA A100" in capsys.readouterr().err


def test_the_system_of_the_measured_gpu_gives_the_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    mix = {**kernels({"nvjet": 500.0}), "operators": []}
    work = {"kernel": "nvjet", "operator": "aten.mm", "launches": 1, "ms": 500.0, "precision": "bf16"}
    measured = figures(
        100.0, device="NVIDIA H200", kernels={**mix, "operators": [{**work, "bytes": 1e9, "flops": 6.65e13}]}
    )
    found = [MeasuredCopy(Job("resnet", 1, "1xH200", False), measured)]
    monkeypatch.setattr(command.Node, "measure", lambda node, jobs, within: found)
    assert cli.run(["characterise", "resnet", "--scale", "1xH200", "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "characterisation.json").read_text())
    assert content["hardware"]["system"] == "h200"
    roofline = content["workloads"]["resnet"]["roofline"]
    assert roofline["kernels"][0]["bound_ms"] == pytest.approx(100.0)  # 66.5 TFLOP at 665 TFLOP/s, of a step of 1 s
    assert roofline["share"] == pytest.approx(0.1)
    cells = {
        row[0]: row[1:]
        for row in Parsed((tmp_path / "characterisation.html").read_text()).tables["Workloads side by side"]
    }
    assert cells["step's share of its roofline"] == ["10.0% (from 100% of the kernel time)"]


def test_an_unknown_variant_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.run(["characterise", "resnet", "--variants", "colour"])
    assert "no variant 'colour'; there are precision, graphs, implementations, gpus" in capsys.readouterr().err
