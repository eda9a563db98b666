"""The published checkpoint, in both namings, goes into every rank's part of network and optimizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from published_ranks import CASES, WORLD, run_rank
from small_gpt3 import architecture
from small_published import (
    SHAPE,
    STEPS,
    WORDS,
    Trainee,
    array,
    beside,
    in_fp32,
    own,
    own_part,
    renamed,
    whole_tensors,
    write_published,
)
from torch import Tensor

from benchmarks.gpt3.published import load_published
from benchmarks.gpt3.published_form import PublishedCheckpoint, shapes
from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import CheckpointError
from common.optim.buffers import split_masters
from tests.command_line import the_message
from tests.conftest import suite
from tests.gloo_ranks import on_ranks

PLACES = [
    *(("reference", *sizes) for sizes in [(1, 1, 1), (1, 2, 2), (4, 2, 1)]),
    *(
        pytest.param("reference", *sizes, marks=pytest.mark.slow)
        for sizes in [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 2)]
    ),
    *((other, *sizes) for other in ("nvidia", "fp32") for sizes in [(1, 1, 1), (2, 2, 1)]),
]
"""The checkpoint, tp, pp and the chunks of a stage."""


class Alone(Layout):
    """A rank's place among others that are not there: it can load, since nothing is sent but to replicas."""

    def _build(self, families: list[tuple[int, ...]], axes: Sequence[str], purpose: str = "") -> None:
        return None


def ranks_of(tp: int, pp: int) -> list[Alone]:
    return [Alone({"tp": tp, "pp": pp}, rank) for rank in range(tp * pp)]


def trainee(layout: Layout, chunks: int = 1, **options: Any) -> Trainee:
    size, index = layout.size("tp"), layout.coordinate("tp")
    return Trainee(layout, TensorParallel(size, index, None if size == 1 else object()), chunks, **options)


def load(one: Trainee, folder: Path, shape: Any = SHAPE, steps: int = STEPS) -> None:
    load_published(folder, one.model, one.optimizer, one.layout, shape, steps, one.model.tensor_splits())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same checkpoint in both namings, and in fp32."""
    root = tmp_path_factory.mktemp("published")
    tensors = whole_tensors()
    write_published(root / "reference", {**tensors, "weights": tensors["masters"]}, SHAPE.layers, STEPS)
    renamed(root / "reference", root / "nvidia")
    in_fp32(root / "reference", root / "fp32")
    return {name: root / name for name in ("reference", "nvidia", "fp32")}


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Tensor]]:
    return whole_tensors()


def rounded(masters: Tensor, remainder: bool) -> Tensor:
    """Parameters of masters; of two numbers that are equally near, those with remainders are the larger one."""
    return split_masters(masters)[0] if remainder else masters.bfloat16()


@pytest.mark.slow_cases("reference-1-1-1", "reference-1-2-2", "nvidia-2-2-1", "fp32-1-1-1", "fp32-2-2-1")
@pytest.mark.parametrize(("naming", "tp", "pp", "chunks"), PLACES)
def test_every_rank_has_its_part_of_weights_masters_and_moments(folders, whole, naming, tp, pp, chunks):
    layers, remainder = set(), naming == "nvidia"
    for layout in ranks_of(tp, pp):
        one = trainee(layout, chunks, masters="remainder" if remainder else "fp32")
        load(one, folders[naming])
        state, parameters = one.optimizer.state_dict(), dict(one.model.named_parameters())
        assert state["step"] == STEPS
        for name, kind, values in one.expected(whole):
            assert torch.equal(state[kind][name], values), (name, kind)
            if kind == "masters":
                assert torch.equal(parameters[name], rounded(values, remainder)), name
        layers |= {name.split(".")[1] for name in parameters if name.startswith("layers.")}
        one.optimizer.check_views()
    assert layers == {str(layer) for layer in range(SHAPE.layers)}


def test_weights_alone_need_no_state(folders, tmp_path, whole):
    folder, one = beside(folders["nvidia"], tmp_path / "weights"), trainee(Layout())
    for path in folder.glob("optimizer.*"):
        path.unlink()
    load_published(folder, one.model, None, Layout(), SHAPE, STEPS, one.model.tensor_splits())
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, own_part(name, whole["masters"][name], Layout()).bfloat16())


def test_a_rank_opens_only_the_chunks_of_its_part(folders, monkeypatch):
    """Two stages of two layers, each on four ranks: of eight chunks of rows a rank has two, and those of its layers."""
    opened = []
    read = PublishedCheckpoint.__init__.__globals__["ZarrArray"].read_piece

    def noted(self: Any, piece: Any, pin: bool = False) -> Tensor:
        opened.append(self.file(piece.chunk))
        return read(self, piece, pin)

    monkeypatch.setattr("common.formats.zarr.ZarrArray.read_piece", noted)
    for layout in ranks_of(4, 2):
        opened.clear()
        load(trainee(layout), folders["reference"])
        up = [
            path.name.split(".") for path in opened if "fp32_from_fp16" in str(path) and "h_to_4h.weight" in str(path)
        ]
        assert len(opened) == len(set(opened))
        first = 2 * layout.coordinate("pp")
        assert {int(layer) for layer, _, _ in up} == {first, first + 1}
        assert {int(row) // 2 for _, row, _ in up} == {layout.coordinate("tp")}
        assert len(up) == 2 * 2 * 8
        down = [
            path.name.split(".") for path in opened if "fp32_from_fp16" in str(path) and "4h_to_h.weight" in str(path)
        ]
        assert {int(column) // 2 for _, _, column in down} == {layout.coordinate("tp")}
        assert len(down) == 2 * 8 * 2


def edit(array: Path, **changes: Any) -> None:
    path = own(array) / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def spoil(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


QKV = "language_model.encoder.layers.self_attention.query_key_value.weight"
MASTERS, FIRST = f"optimizer.state.fp32_from_fp16.{QKV}", f"optimizer.state.exp_avg.{QKV}"
SECOND = f"optimizer.state.exp_avg_sq.{QKV}"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda f: (f / "language_model.embedding.word_embeddings.weight").unlink(),
                r"holds no published checkpoint of GPT-3: language_model\.embedding.*is missing"),
    "chunk": (lambda f: (own(f / FIRST) / "2.3.1").unlink(),
              r"exp_avg\..*query_key_value\.weight/2\.3\.1: a chunk is missing"),
    "cut off": (lambda f: shorten(own(f / MASTERS) / "0.0.0"), r"0\.0\.0: a chunk of .* cut off"),
    "moments": (lambda f: (f / SECOND).unlink(), "exp_avg_sq.* is no Zarr array"),
    "masters": (lambda f: (f / MASTERS).unlink(), "fp32_from_fp16.* is no Zarr array"),
    "compressed": (lambda f: edit(f / FIRST, compressor={"id": "zstd"}), "compressed"),
    "integers": (lambda f: edit(f / FIRST, dtype="<i4"), r"torch\.int32 of shape \[4, 96, 32\]"),
    "common": (lambda f: (f / "common.pt").unlink(), r"common\.pt is missing"),
    "no step": (lambda f: torch.save({"step": 4000}, f / "common.pt"), "does not say at which step"),
    "two steps": (lambda f: torch.save({"optimizer": [{"step": 3}, {"step": 4}]}, f / "common.pt"), r"\[3, 4\]"),
    "no number": (lambda f: torch.save({"optimizer": {"step": float("nan")}}, f / "common.pt"), "damaged .*NaN"),
    "hostile": (lambda f: torch.save({"optimizer": shutil.rmtree}, f / "common.pt"), r"asks for shutil\.rmtree"),
    "settings": (lambda f: (f / "metadata.json").unlink(), r"metadata\.json is missing"),
    "other form": (lambda f: (f / "metadata.json").write_text('{"sharded_backend": "torch_dist"}'), "'torch_dist'"),
    "damaged settings": (lambda f: (f / "metadata.json").write_text("[]"), r"metadata\.json is damaged"),
    "not finite": (lambda f: spoil(own(f / FIRST) / "1.0.0"), r"exp_avg of layers\.1\.qkv\.weight are not all finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_one_error(folders, tmp_path, case):
    spoilt, words = BAD[case]
    folder = beside(folders["reference"], tmp_path / "checkpoint")
    spoilt(folder)
    one = trainee(Layout())
    with pytest.raises(CheckpointError, match=words):
        load(one, folder)
    if case != "not finite":
        assert all(bool((parameter == 7.0).all()) for parameter in one.model.parameters()), "nothing was loaded"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 3}, r"shape \[4, 32\], and the network has \[3, 32\]: it is the checkpoint of another network"),
        ({"vocabulary": WORDS + 1}, r"shape \[176, 32\], and the network has \[177, 32\] or more rows"),
        ({"positions": 49}, r"shape \[48, 32\], and the network has \[49, 32\] or more rows"),
        ({"feed_forward": 64}, r"and the network has \[4, 64, 32\]"),
    ],
)
def test_another_network_is_one_error(folders, changes, words):
    with pytest.raises(CheckpointError, match=words):
        load(trainee(Layout()), folders["nvidia"], architecture(**{"layers": 4, **changes}))


def test_another_number_of_updates_is_another_checkpoint(folders):
    with pytest.raises(CheckpointError, match=r"4000 updates made the checkpoint, and checkpoint_steps=3000"):
        load(trainee(Layout()), folders["nvidia"], steps=3000)


MLCOMMONS = "ckpt4000-consumed_samples=0"


@pytest.mark.slow_cases("bf16", "in the downloader's folder", "fp32")
@pytest.mark.parametrize(
    ("naming", "path", "common"),
    [
        ("reference", MLCOMMONS, False),
        ("reference", f"megatron-lm/{MLCOMMONS}", False),
        ("fp32", "ckpt4000_fp32", True),
        ("nvidia", "checkpoint", True),
    ],
    ids=["bf16", "in the downloader's folder", "fp32", "any name"],
)
def test_the_checkpoint_is_found_below_the_assets_as_its_archive_unpacks(
    folders, whole, tmp_path, naming, path, common
):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    folder = beside(folders[naming], tmp_path / path)
    if not common:
        (folder / "common.pt").unlink()
    one = trainee(Layout())
    load(one, tmp_path)
    assert one.optimizer.state_dict()["step"] == STEPS
    for name, kind, values in one.expected(whole):
        assert torch.equal(one.optimizer.state_dict()[kind][name], values), (name, kind)


@pytest.mark.slow_cases("named")
@pytest.mark.parametrize("chosen", [[], [f"model.checkpoint='{MLCOMMONS}'"]], ids=["found", "named"])
def test_a_run_begins_with_the_checkpoint_as_its_archive_unpacks(chosen, tmp_path, data_of):
    facts = {"checkpoint_samples": 4, "checkpoint_steps": 4000}
    given = ["benchmark=gpt3", "scale=test", *(f"benchmark.facts.{name}={value}" for name, value in facts.items())]
    network = cli.load(compose(given))[0].workload.facts
    tensors = {
        name.replace("layers.", f"layers.{layer}.", 1): torch.full(shape, 0.01)
        for name, shape in shapes(network).items()
        for layer in range(network.layers)
    }
    every = dict.fromkeys(("weights", "exp_avg", "exp_avg_sq"), tensors)
    write_published(tmp_path / "assets" / MLCOMMONS, every, network.layers, 4000)
    (tmp_path / "assets" / MLCOMMONS / "common.pt").unlink()
    done = suite(
        "train", *given, *chosen, "device=cpu", f"assets_dir={tmp_path / 'assets'}", f"data_dir={data_of('gpt3')}",
        f"output_dir={tmp_path / 'run'}", "benchmark.schedule.last_samples=16",
    )  # fmt: skip
    assert done.code in (0, 10), done.errors


def test_a_checkpoint_without_name_and_number_of_updates_names_the_remedy(folders, tmp_path):
    (beside(folders["reference"], tmp_path / "checkpoint") / "common.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"common\.pt is missing.*its name back, ckpt4000.*json_to_torch\.py -i"
    ) as error:
        load(trainee(Layout()), tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/checkpoint/common.pt")


def test_two_checkpoints_and_a_packed_one_are_named(folders, tmp_path):
    with pytest.raises(CheckpointError, match="holds no published checkpoint") as error:
        load(trainee(Layout()), tmp_path)
    assert "packed" not in str(error.value)
    (tmp_path / "checkpoint_nemo_bf16.tar").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint_nemo_bf16\.tar is still packed"):
        load(trainee(Layout()), tmp_path)
    for name in ("one", "two"):
        own(beside(folders["reference"], tmp_path / name) / "language_model.embedding.word_embeddings.weight")
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}/one/.* and {tmp_path}/two/.* are two copies.*model\.checkpoint"
    ):
        load(trainee(Layout()), tmp_path)


def test_rows_behind_the_last_word_are_not_read(folders, tmp_path, whole):
    """They are zero instead."""
    folder = beside(folders["reference"], tmp_path / "checkpoint")
    name = "optimizer.state.exp_avg.language_model.embedding.word_embeddings.weight"
    (folder / name).unlink()
    table = whole["exp_avg"]["embedding.weight"].clone()
    table[SHAPE.vocabulary :] = torch.nan
    array(folder / name, table, half=False)
    one = trainee(Layout())
    load(one, folder)
    found = one.optimizer.state_dict()["exp_avg"]["embedding.weight"]
    assert torch.equal(found, own_part("embedding.weight", table, Layout()))
    assert torch.count_nonzero(found[SHAPE.vocabulary :]) == 0


def test_a_missing_checkpoint_is_an_error_that_names_its_path(tmp_path, data_of):
    done = suite(
        "train", "benchmark=gpt3", "scale=test", "device=cpu", f"assets_dir={tmp_path}", f"data_dir={data_of('gpt3')}",
        f"output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert done.code == CheckpointError.exit_code
    assert f"{tmp_path} holds no published checkpoint of GPT-3" in the_message(done)


@pytest.fixture(scope="module")
def ranks(folders, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks have loaded in every case, of which only the first replica's see the folder."""
    return on_ranks(partial(run_rank, folder=folders["nvidia"]), WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_one_replica_reads_and_the_others_have_the_same(ranks, whole, case):
    sizes, options = CASES[case]
    seen, remainder = 0, options.get("masters") == "remainder"
    for rank, found in enumerate(ranks):
        layout = Layout(sizes, rank)
        content = found[case]
        assert content["read"] == (layout.index("dp") == 0)
        for name, parameter in content["model"].items():
            masters = own_part(name, whole["masters"][name], layout)
            assert torch.equal(parameter, rounded(masters, remainder)), name
            for kind in ("masters", "exp_avg", "exp_avg_sq") if content["state"] else ():
                seen += 1
                assert torch.equal(content["state"][kind][name], own_part(name, whole[kind][name], layout)), name
    assert seen


def test_a_chunk_that_one_rank_misses_is_the_same_error_on_all(ranks):
    errors = {found["error"] for found in ranks}
    assert len(errors) == 1
    assert "3.0.0: a chunk is missing" in errors.pop()
