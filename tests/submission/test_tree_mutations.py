"""`check` refuses submission trees with damaged, removed or renamed files.

The checkers of MLCommons run on every tree, which takes seconds: a session runs a small fixed sample of the mutations
of one tree, and ``-m slow`` draws from four. The rule is the strict one of :mod:`oracle`, except that only `check`
must refuse, because `summarize` reads only the results.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from closed_logs import RECIPES, closed_log
from launched import SYSTEM, Clone, package_arguments, submission, write_series, write_submission
from mutated_files import file_mutations, json_mutations
from mutations import SEED, Mutation, drawn, wants_every_case
from oracle import Outcome, Workplace, faults, kept_answers

from common.submission.package import main as package

SAMPLE, MANY = 1, 60
RESULTS = f"results/{SYSTEM}"
TREES = {"resnet": "resnet", "bert": "bert", "unet3d": "unet3d", "cosmoflow": "strong/cosmoflow"}
"""Benchmark to the folder of its results below that of the system."""


@dataclass(frozen=True)
class TreeMutation:
    """A change of a tree.

    Attributes:
        operator: kind of change.
        apply: changes the submitter's folder.
        file: file that a refusal must name.
    """

    name: str
    operator: str
    apply: Callable[[Path], object]
    file: str


def mutations_of(tree: Path, benchmark: str) -> Iterator[TreeMutation]:
    """Yield all mutations of the files and folders of a tree."""
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        relative, text = str(path.relative_to(tree)), path.read_text()
        damages = json_mutations(text) if path.suffix == ".json" else file_mutations(text)
        for damage in damages:
            yield _of_file(relative, damage)
        yield TreeMutation(
            f"{relative}: doubled under another name", "doubled",
            lambda tree, r=relative: shutil.copyfile(tree / r, (tree / r).with_stem("result_99")), "result_99",
        )  # fmt: skip
        yield TreeMutation(
            f"{relative}: the log of another benchmark", "another log",
            lambda tree, r=relative: (tree / r).write_text(closed_log("bert" if benchmark != "bert" else "resnet", 5)),
            path.name,
        )  # fmt: skip
    for name, apply, file in _of_folders(f"{RESULTS}/{TREES[benchmark]}"):
        yield TreeMutation(name, name, apply, file)


def _of_file(path: str, mutation: Mutation) -> TreeMutation:
    return TreeMutation(
        f"{path}: {mutation.name}", mutation.operator, lambda tree: mutation.apply(tree / path),
        path.rpartition("/")[2],
    )  # fmt: skip


ODD_NAMES = {
    "a name with a line feed": "a\nrun.log: VALID RUN (resnet, ruleset 4.0.0)",
    "a name with a bracket": "[a]",
    "a name with a star": "*",
    "a name with a leading dash": "--help",
    "a name with spaces": "two words",
    "a name with a leading dot": ".hidden",
    "a name of bytes": os.fsdecode(b"a\xff"),
    "a name with an escape": "a\x1b[2Jb",
    "a name of 255 characters": "x" * 255,
    "another benchmark": "ssd",
    "a benchmark of nobody": "alexnet",
    "a name in capitals": "RESNET",
}


def _of_folders(results: str) -> Iterator[tuple[str, Callable[[Path], object], str]]:
    """Yield name, change, and the file or folder that a refusal must name."""
    system, description = RESULTS, f"systems/{SYSTEM}.json"

    def renamed(old: str, new: str) -> Callable[[Path], object]:
        return lambda tree: (tree / old).rename((tree / old).with_name(new))

    def linked(name: str) -> Callable[[Path], object]:
        def apply(tree: Path) -> None:
            elsewhere = tree.parent / "elsewhere"
            (tree / name).rename(elsewhere)
            (tree / name).symlink_to(elsewhere)

        return apply

    def copied(new: str, described: bool) -> Callable[[Path], object]:
        def apply(tree: Path) -> None:
            shutil.copytree(tree / system, (tree / system).with_name(new))
            if described:
                shutil.copyfile(tree / description, (tree / description).with_name(f"{new}.json"))

        return apply

    for what, name in ODD_NAMES.items():
        shown, code = (name, name) if name.isprintable() else ("results", "benchmarks")
        yield f"the benchmark's folder has {what}", renamed(results, name), shown
        yield f"the system's folder has {what}", renamed(system, name), shown
        yield f"a file of the code has {what}", lambda tree, n=name: (tree / "benchmarks" / n).touch(), code
        yield f"a system has {what}", renamed(description, f"{name[:200]}.json"), SYSTEM
        yield f"a further folder of results has {what}", (
            lambda tree, n=name: (tree / results).with_name(n).mkdir()), shown  # fmt: skip
    for folder in ("results", "systems", "benchmarks", system, results):
        yield f"{folder}: a link to itself elsewhere", linked(folder), folder.rpartition("/")[2]
        yield f"{folder}: empty", lambda tree, f=folder: (shutil.rmtree(tree / f), (tree / f).mkdir()), "acme"
        yield f"{folder}: removed", lambda tree, f=folder: shutil.rmtree(tree / f), "acme"
        yield f"{folder}: with a link to its own folder", (
            lambda tree, f=folder: (tree / f / "loop").symlink_to(".")), "loop"  # fmt: skip
        yield f"{folder}: with a link to the root", lambda tree, f=folder: (tree / f / "root").symlink_to("/"), "root"
        yield f"{folder}: with a pipe", lambda tree, f=folder: os.mkfifo(tree / f / "pipe"), "pipe"
        yield f"{folder}: with 100 folders within each other", (
            lambda tree, f=folder: (tree / f / "/".join("d" * 100)).mkdir(parents=True)), "/d"  # fmt: skip
    yield "results copied under a second system", copied("second", False), "second"
    yield "results and description copied under a second system", copied("second", True), "second"
    for name in ("5.txt", "00.txt", "0 copy.txt", "-1.txt", "99999999999999999999.txt", "4.txt.gz"):
        yield f"a result doubled as result_{name}", (
            lambda tree, n=name: shutil.copyfile(tree / results / "result_0.txt", tree / results / f"result_{n}")
        ), f"result_{name}"  # fmt: skip
    for factor in ("0.5", "1", "-1", "NaN", '"x"'):
        content = f'{{"scaling_factor": {factor}}}'
        yield f"scaling.json with the factor {factor}", (
            lambda tree, c=content: (tree / results / "scaling.json").write_text(c)), "scaling.json"  # fmt: skip
    yield "a file above 50 MB", lambda tree: _sparse(tree / "benchmarks" / "weights.bin", 51 * 2**20), "weights.bin"
    yield "a file of 2 TB", lambda tree: _sparse(tree / "benchmarks" / "weights.bin", 2**41), "weights.bin"
    yield "a description of 3 GB", lambda tree: _sparse(tree / description, 3 * 2**30), f"{SYSTEM}.json"
    yield "a log of 3 GB", lambda tree: _sparse(tree / results / "result_1.txt", 3 * 2**30), "result_1.txt"


def _sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "benchmark" not in metafunc.fixturenames:
        return
    if wants_every_case(metafunc.config):
        count = int(os.environ.get("MUTATIONS_COUNT", MANY))
        cases = [pytest.param(name, count, id=name, marks=pytest.mark.slow) for name in RECIPES]
    else:
        cases = [pytest.param("resnet", SAMPLE, id="sample")]
    metafunc.parametrize(("benchmark", "count"), cases)


@pytest.fixture
def tree_of(tmp_path: Path, clone: Clone) -> Callable[[str], Path]:
    """A function that returns the tree that `package` builds from a result of a benchmark."""

    def make(benchmark: str) -> Path:
        results = write_series(tmp_path / "series" / benchmark, benchmark, clone.commit)
        settings = write_submission(tmp_path / "acme.yaml", submission({"system": SYSTEM, "results": str(results)}))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = package(package_arguments(settings, tmp_path / "made", clone, RECIPES[benchmark].ruleset))
        assert code == 0, out.getvalue()
        return tmp_path / "made" / "acme"

    return make


def _chosen(mutations: list[TreeMutation], count: int, seed: int) -> list[TreeMutation]:
    """Return the one that the environment names, or some of each operator in turn."""
    if (named := os.environ.get("MUTATION")) is not None:
        return [each for each in mutations if each.name == named]
    return drawn(mutations, count, seed)


@pytest.mark.timeout(7200)
@pytest.mark.slow
def test_damaged_tree(benchmark, count, tree_of, tmp_path):
    valid, ruleset = tree_of(benchmark), RECIPES[benchmark].ruleset
    workplace = Workplace(tmp_path / "workplace")
    every = list(mutations_of(valid, benchmark))
    wrong = []
    with kept_answers():
        before = _observed(workplace, valid, ruleset)
        assert before.facts is not None, before.messages
        assert before.facts.codes == (0, 0), before.messages
        for mutation in _chosen(every, count, SEED):
            after = _observed(workplace, valid, ruleset, mutation)
            found = faults(before.facts, after, mutation.file, None, ["check"])
            wrong += [f"{mutation.name}: {text}" for text in found]
    if wrong:
        pytest.fail(f"seed {SEED}:\n  " + "\n  ".join(wrong), pytrace=False)


def _observed(workplace: Workplace, valid: Path, ruleset: str, mutation: TreeMutation | None = None) -> Outcome:
    workplace.clear()
    tree = Path(shutil.copytree(valid, workplace.read / "acme"))
    if mutation is not None:
        mutation.apply(tree)
    return workplace.observe([tree], "--ruleset", ruleset, runs=[tree / "results"])


def test_names_of_mutations_tell_them_apart(tmp_path):
    names = [name for name, _, _ in _of_folders(f"{RESULTS}/resnet")]
    assert len(names) == len(set(names))
