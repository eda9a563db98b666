"""Commands that generate, prepare and verify MiniGo's bootstrap: games of the start model, and the target.

``prepare`` plays the games with the components of self-play. A task is one file of games. It is a function of the
start model, the settings and its number, on one kind of device and up to rounding. An interrupted preparation continues
with the files that are missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks.minigo.bootstrap import BootstrapOptions, generate, of_rules, options_of, untrained
from benchmarks.minigo.data import BOOTSTRAP, FORMAT, PREPARE_COMMAND, START
from benchmarks.minigo.evaluate import TARGET
from benchmarks.minigo.features import feature_bytes
from benchmarks.minigo.inference import BatchedInference, sizes_up_to
from benchmarks.minigo.model import InferenceNetwork, MiniGoArchitecture, check_weights
from benchmarks.minigo.models import write_model
from benchmarks.minigo.records import CLOSED, SUFFIX, Games, Shard, generation_folder, write_games
from benchmarks.minigo.selfplay import FinishedGame, SelfPlay
from common.data import manifest, preparation
from common.data.commands import AssetsDir, DataCommands
from common.data.manifest import Manifest, file_entry
from common.data.options import Option
from common.data.order import sample_generator
from common.data.preparation import Preparation, assets_of, locked, preparing
from common.data.published import Published
from common.data.stages import Stages
from common.data.synthetic import description_of
from common.errors import CheckpointError, DataError
from common.formats.safetensors_file import read_tensors
from common.untrusted.strict_json import parse_object

RECORDS, STAGE = "records", "games"
SHARD_GAMES = 128
"""Games in a file."""
CONCURRENT = 64
"""Games that a process plays at a time."""
RECORDS_PER_POINT = 1.33
"""Estimate of the records of a bootstrap game, in the mean over games, per point of the board: 480 on 19x19."""
MEMORY_PER_WORKER = 2 << 30
"""Bytes of memory for a process, with its CUDA context."""
PUBLISHED = Published(
    known="the starting model, its games and the target model are our own, because MLPerf's are no longer published"
)


def prepare(
    raw_dir: Path,
    data_dir: Path,
    workers: int = 1,
    start: Annotated[Path | None, Option("model that plays the games (default: RAW_DIR/" + START + ")")] = None,
    target: Annotated[
        Path | None,
        Option("model that evaluation plays against (default: RAW_DIR/" + TARGET + "); replaces that of prepared data"),
    ] = None,
    untrained_models: Annotated[
        bool, Option("use an untrained network where there is no model", "--untrained")
    ] = False,
    assets_dir: AssetsDir = None,
) -> Manifest:
    """Play the bootstrap games and store them with the target. Skip complete data, and continue interrupted ones.

    Args:
        raw_dir: folder of :mod:`benchmarks.minigo.bootstrap`. It need not exist if all models are given.
        workers: processes that play, which share the GPU if there is one.

    Raises:
        CheckpointError: a model is damaged or of another network.
        DataError: a model is missing; the disk is full; ``data_dir`` has data of another source, or another process is
            preparing it.
    """
    if target is not None and (data_dir / manifest.NAME).exists():
        return _replace_target(data_dir, target, raw_dir / START if start is None else start, start is not None)
    description = description_of(raw_dir)
    options = of_rules() if description is None else options_of(description)
    models = {
        role: _model(options, role, raw_dir / name if path is None else path, untrained_models)
        for role, name, path in (("start", START, start), ("target", TARGET, target))
    }
    playing = _playing(options, models["start"])
    wanted = {"fingerprint": _sha256(playing, _digest(models["target"]))}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, description) as job:
        assets = assets_of(data_dir) if assets_dir is None else assets_dir
        if job.found is None:
            job.begin(RECORDS)
            write_model(data_dir / TARGET, models["target"], 0)
        if job.found is None or not (assets / START).exists():
            write_model(assets / START, models["start"], 0)
        return job.found or _play(job, options, assets / START, workers, playing)


def play_shard(path: Path, model: Path, options: BootstrapOptions, generation: int, numbers: range) -> dict[str, int]:
    """Play games of a generation, and write them to ``path`` unless this file is there already.

    Args:
        model: file of the model that plays.
        numbers: numbers of the games in their generation, which with the seed determine their random numbers.

    Returns:
        Numbers of games and records in the file.

    Raises:
        CheckpointError: the model is damaged.
        DataError: the disk is full, or an existing file is damaged.
    """
    path.with_name(f"{path.name}.partial").unlink(missing_ok=True)  # of an interrupted preparation
    if not path.exists():
        seed = int(sample_generator(options.seed, generation).integers(2**63))
        played = sorted(_games(model, options, seed, numbers), key=lambda game: game.number)
        write_games(path, played)
    shard = Shard.checked(path, options.board)
    return {"games": shard.games, "records": len(shard.outcome_R)}


def _games(model: Path, options: BootstrapOptions, seed: int, numbers: range) -> Iterator[FinishedGame]:
    network = _network(model, options.architecture(), CONCURRENT * options.virtual_losses)
    concurrent = min(CONCURRENT, len(numbers))
    play = SelfPlay(options.settings(), concurrent, seed, first=numbers.start, total=len(numbers))
    while len(bits_BK := play.leaves()):
        play.answer(*network(bits_BK))
        yield from play.take_finished()
    yield from play.take_finished()  # the last games may end without further leaves


@functools.lru_cache(1)
def _network(model: Path, architecture: MiniGoArchitecture, largest: int) -> BatchedInference:
    """Return the network of a file, on the GPU in bf16 if there is one. A process uses it for all its tasks."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    network = InferenceNetwork(architecture, device=device, dtype=dtype)
    inference = BatchedInference(network, sizes_up_to(largest), flights=1)
    inference.load(read_tensors(model, torch.device(device)))
    return inference


def _play(job: Preparation, options: BootstrapOptions, model: Path, workers: int, playing: str) -> Manifest:
    """Play all games, and write the manifest."""
    folder = job.data_dir / BOOTSTRAP
    tasks: dict[str, tuple[Any, ...]] = {}
    for generation in range(options.generations):
        for number, first in enumerate(range(0, options.games, SHARD_GAMES)):
            path = generation_folder(folder, generation) / f"{number:06d}{SUFFIX}"
            numbers = range(first, min(first + SHARD_GAMES, options.games))
            tasks[f"{generation:06d}-{number:06d}"] = path, model, options, generation, numbers
    record_bytes = feature_bytes(options.board) + 4 * (options.board**2 + 1) + 1
    with Stages(job.data_dir / RECORDS, workers) as stages:
        left = sum(len(numbers) for name, (*_, numbers) in tasks.items() if stages.record(STAGE, name) is None)
        needed = left * RECORDS_PER_POINT * options.board**2 * record_bytes
        preparation.require_space(job.data_dir, int(needed), more=left < options.generations * options.games)
        records = stages.run(STAGE, tasks, play_shard)
    for generation in range(options.generations):
        Games(folder, options.board).close(generation)
    files = [path for path, *_ in tasks.values()]
    files += [generation_folder(folder, generation) / CLOSED for generation in range(options.generations)]
    names = [TARGET, *(path.relative_to(job.data_dir).as_posix() for path in files)]
    counts = {
        "train_samples": sum(record["games"] for record in records.values()),
        "records": sum(record["records"] for record in records.values()),
        "generations": options.generations,
        "board": options.board,
    }
    described = manifest.describe_files(job.data_dir, names)
    return job.finish(described, counts, "games of our own starting model", {"games": playing})


def _replace_target(data_dir: Path, target: Path, start: Path, start_given: bool) -> Manifest:
    """Replace the target of prepared data, whose games do not depend on it. Refuse another start."""
    with locked(data_dir):
        found = manifest.read_alone(data_dir, FORMAT, f"run '{PREPARE_COMMAND}'")  # the old target may be missing
        try:
            options = options_of(parse_object(found.source["description"])) if found.synthetic else of_rules()
            playing = found.source["games"]
        except (KeyError, ValueError) as error:
            raise DataError(
                f"{data_dir / manifest.NAME} does not say how games were played; delete the folder, and prepare again"
            ) from error
        other = (start_given or start.exists()) and _model(options, "start", start, False)
        if other and _playing(options, other) != playing:
            raise DataError(
                f"the games in {data_dir} were played by another start than {start}, and --target replaces the target "
                "alone: delete the folder or name another --data-dir"
            )
        weights = _model(options, "target", target, False)
        write_model(data_dir / TARGET, weights, 0)
        fingerprint = _sha256(playing, _digest(weights))
        files = {**found.files, TARGET: file_entry(data_dir / TARGET)}
        source = {**found.source, "fingerprint": fingerprint, "prepared": preparation.now()}
        made = replace(found, files=files, source=source)
        manifest.write(data_dir, made)
        return made


def _model(options: BootstrapOptions, role: str, path: Path, untrained_models: bool) -> dict[str, Tensor]:
    """Return the tensors of a model, with the sizes of ``options``."""
    if not path.exists():
        if untrained_models:
            return untrained(options)
        raise DataError(
            f"{path} is missing: give --{role} MODEL, such as OUTPUT/self-play/models/000045.safetensors of a training "
            "run, or --untrained for an untrained network"
        )
    try:
        weights = read_tensors(path, torch.device("cpu"))
    except CheckpointError as error:
        raise DataError(str(error)) from error
    try:
        check_weights(options.architecture(), weights)
    except CheckpointError as error:
        raise DataError(f"{path} is {error}") from error
    return weights


def _playing(options: BootstrapOptions, start: Mapping[str, Tensor]) -> str:
    """Return a digest of all that determines the games."""
    return _sha256(json.dumps(asdict(options), sort_keys=True), _digest(start))


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors in the form in which they are stored."""
    parts = []
    for name, tensor in sorted(weights.items()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}")
    return _sha256(*parts)


def _sha256(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


COMMANDS = DataCommands(
    "minigo",
    raw="models: " + START + " and " + TARGET,
    prepared="bootstrap games and target",
    real="MLPerf's starting model and target",
    generate=generate,
    prepare=prepare,
    verify=manifest.verification(FORMAT, PREPARE_COMMAND),
    assets=((START,),),
    published=PUBLISHED,
    memory_per_worker=MEMORY_PER_WORKER,
)
