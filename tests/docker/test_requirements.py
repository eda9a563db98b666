"""Pinned versions of the images, compared with pyproject.toml, with each other, and with the package registry."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "requirements"
FILES = sorted(FOLDER.glob("*.txt"))
SOURCE_ONLY = ("source_only.txt", "transformer_engine_torch.txt")
"""Files of packages without wheels in the registry; the compiler stages build them."""

PYTHON = "3.12"
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64"]
"""The interpreter of the base image, and the platforms of wheels for Ubuntu 24.04 (glibc 2.39)."""


def load_check() -> ModuleType:
    """Import docker/check_versions.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("check_versions", ROOT / "docker" / "check_versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = load_check()
CONSTRAINTS: dict[str, str] = CHECK.read_pins(ROOT / "docker" / "constraints.txt")
PINS: dict[str, str] = {name: version for path in FILES for name, version in CHECK.read_pins(path).items()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("dali-cu13", "te", "cudnn", "flash-attention-4", "tensorboard")
WANTED = [Requirement(text) for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra]]
WANTED += [Requirement(text) for text in PROJECT["dependencies"]]


def canonical(pins: dict[str, str]) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in pins.items()}


@pytest.mark.parametrize("requirement", WANTED, ids=str)
def test_a_dependency_of_the_project_is_pinned_within_its_range(requirement: Requirement):
    pinned = {**canonical(CONSTRAINTS), **canonical(PINS)}.get(canonicalize_name(requirement.name))

    assert pinned is not None, f"docker/requirements pins no {requirement.name}"
    assert requirement.specifier.contains(pinned)


def test_requirements_and_constraints_agree():
    both = canonical(PINS).keys() & canonical(CONSTRAINTS).keys()

    assert both == {"antlr4-python3-runtime", "packaging"}
    assert {name: canonical(PINS)[name] for name in both} == {name: canonical(CONSTRAINTS)[name] for name in both}


def test_the_dockerfile_installs_every_file_of_requirements():
    text = (ROOT / "docker" / "Dockerfile").read_text()

    assert not [path.name for path in FILES if path.name not in text]


def test_a_requirement_without_a_version_is_refused(tmp_path: Path):
    (tmp_path / "loose.txt").write_text("numpy>=2\n")

    with pytest.raises(ValueError, match="'numpy>=2' is not of the form name==version"):
        CHECK.read_pins(tmp_path / "loose.txt")


def test_a_replaced_pytorch_ends_the_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CHECK, "installed", {"torch": "2.15.0", "torchvision": "0.26.0", "triton": "3.6.0"}.get)

    assert CHECK.problems({}, CONSTRAINTS) == ["torch is 2.15.0, not 2.11.0"]


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130"])
@pytest.mark.parametrize(
    ("cuda", "problem"), [("13.0", []), ("12.8", ["for CUDA 12.8, not 13.0"]), (None, ["for CUDA None, not 13.0"])]
)
def test_pytorch_for_another_cuda_ends_the_build(
    monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, problem: list[str]
):
    versions = {"torch": version, "torchvision": "0.26.0", "triton": "3.6.0"}
    monkeypatch.setattr(CHECK, "installed", versions.get)
    monkeypatch.setattr(CHECK, "cuda_of_torch", lambda: cuda)

    assert CHECK.problems({}, CONSTRAINTS) == [f"torch {version} is {text}" for text in problem]


def test_the_cuda_of_the_installed_pytorch_is_read_from_it():
    assert CHECK.cuda_of_torch() == torch.version.cuda


def test_a_missing_package_ends_the_build(monkeypatch: pytest.MonkeyPatch):
    versions = {"torch": "2.11.0+cu130", "torchvision": "0.26.0+cu130", "triton": "3.6.0"}
    monkeypatch.setattr(CHECK, "installed", versions.get)
    monkeypatch.setattr(CHECK, "cuda_of_torch", lambda: "13.0")

    assert CHECK.problems({"tqdm": "4.70.1"}, CONSTRAINTS) == ["tqdm 4.70.1 is not installed"]


def offered(name: str, *, wheels: bool, retries: int = 4) -> list[str]:
    """Return the versions in the configured registry for the image's interpreter; empty if it cannot be reached."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", name, "--python-version", PYTHON]
    if wheels:
        command += ["--only-binary", ":all:", *(word for platform in PLATFORMS for word in ("--platform", platform))]
    done = subprocess.run(
        [*command, "--timeout", "15", "--retries", str(retries), "--disable-pip-version-check"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("Available versions:")]
    return lines[0].partition(":")[2].replace(" ", "").split(",") if lines else []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a process for each pin
def test_every_pinned_version_is_in_the_package_registry():
    if len(offered("numpy", wheels=True, retries=0)) < 2:
        pytest.skip("the package registry cannot be reached: no pinned version was looked up")
    wheels = {**CONSTRAINTS, **PINS}
    sources = {name: wheels.pop(name) for file in SOURCE_ONLY for name in CHECK.read_pins(FOLDER / file)}
    questions = [(name, version, True) for name, version in wheels.items()]
    questions += [(name, version, False) for name, version in sources.items()]

    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda question: offered(question[0], wheels=question[2]), questions)

    missing = [f"{name}=={version}" for (name, version, _), found in zip(questions, answers, strict=True)
               if version not in found]  # fmt: skip
    assert not missing
