"""Pinned versions of the images, compared with pyproject.toml, with each other, and with the package registry."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
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


def load_versions() -> ModuleType:
    """Import docker/versions.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "docker" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERSIONS = load_versions()
TEXT = (ROOT / "docker" / "constraints.txt").read_text()
PINS: dict[str, str] = VERSIONS.read_pins(TEXT)
NAMES = {name: path.name for path in FILES for name in VERSIONS.read_names(path.read_text())}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("dali-cu13", "te", "cudnn", "flash-attention-4", "tensorboard", "minigo")
WANTED = [Requirement(text) for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra]]
WANTED += [Requirement(text) for text in PROJECT["dependencies"]]


@pytest.mark.parametrize("requirement", WANTED, ids=str)
def test_a_dependency_of_the_project_is_pinned_within_its_range(requirement: Requirement):
    pinned = PINS.get(canonicalize_name(requirement.name))

    assert pinned is not None, f"docker/constraints.txt pins no {requirement.name}"
    assert requirement.specifier.contains(pinned)


def test_a_dependency_of_the_suite_is_installed():
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}

    assert names <= NAMES.keys() | {"torch", "torchvision"}


@pytest.mark.parametrize("name", NAMES)
def test_a_package_of_an_image_is_pinned(name: str):
    assert name in PINS, f"docker/constraints.txt pins no {name}, which {NAMES[name]} names"


def test_the_images_and_the_bundle_have_the_same_versions():
    """The base image of docker/debian_base.sh has those of the root's constraints.txt, the others those of docker's."""
    ours = VERSIONS.read_pins((ROOT / "constraints.txt").read_text())
    both = (ours.keys() & PINS.keys()) - set(VERSIONS.BASE_IMAGE)

    assert len(both) > 20
    assert {name: PINS[name] for name in both} == {name: ours[name] for name in both}


def test_the_dockerfile_installs_every_file_of_requirements():
    text = (ROOT / "docker" / "Dockerfile").read_text()

    assert not [path.name for path in FILES if path.name not in text]


def test_a_pin_without_a_version_is_refused():
    with pytest.raises(ValueError, match="'numpy>=2' is not of the form name==version"):
        VERSIONS.read_pins("numpy>=2\n")


def test_two_versions_of_a_package_are_refused():
    with pytest.raises(ValueError, match="two versions of ml_dtypes"):
        VERSIONS.read_pins("ml-dtypes==1\nml_dtypes==2\n")


def test_a_requirement_with_a_version_is_refused():
    with pytest.raises(ValueError, match=r"'numpy==2' is not a bare name; versions stand in constraints\.txt"):
        VERSIONS.read_names("# a comment\nnumpy==2\n")


def test_a_wrong_pin_of_a_base_image_is_a_message(capsys: pytest.CaptureFixture[str]):
    assert VERSIONS.main(["pin", "torch=2.11"]) == 2
    assert capsys.readouterr().err == "--build-arg PINS: 'torch=2.11' is not of the form name==version\n"


def test_pins_of_a_base_image_replace_ours_and_add_to_them():
    pins = VERSIONS.read_pins("Ml_Dtypes==0.7.0 jinja2==3.1.6")

    text = VERSIONS.replace_pins("# PyTorch\ntorch==2.11.0\n\nml-dtypes==0.6.0\n", pins)

    assert text == "# PyTorch\ntorch==2.11.0\n\nml-dtypes==0.7.0\njinja2==3.1.6\n"


BASE = {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets the installed versions, by name, and the CUDA version of PyTorch."""

    def install(versions: Mapping[str, str], cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(VERSIONS, "installed", versions.get)
        monkeypatch.setattr(VERSIONS, "cuda_of_torch", lambda: cuda)

    return install


def test_a_replaced_pytorch_ends_the_build(installed):
    installed({**BASE, "torch": "2.15.0"})

    assert VERSIONS.problems([], PINS, "13.0") == ["torch is 2.15.0, not 2.11.0"]


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130"])
@pytest.mark.parametrize(
    ("cuda", "problem"), [("13.0", []), ("12.8", ["for CUDA 12.8, not 13.0"]), (None, ["for CUDA None, not 13.0"])]
)
def test_pytorch_for_another_cuda_ends_the_build(installed, version: str, cuda: str | None, problem: list[str]):
    installed({**BASE, "torch": version}, cuda)

    assert VERSIONS.problems([], PINS, "13.0") == [f"torch {version} is {text}" for text in problem]


def test_a_local_version_may_be_pinned_whole(installed):
    installed({**BASE, "torch": "2.11.0a0+5c9.nv"})

    assert VERSIONS.problems([], {**PINS, "torch": "2.11.0a0+5c9.nv"}, "13.0") == []


def test_the_cuda_of_the_installed_pytorch_is_read_from_it():
    assert VERSIONS.cuda_of_torch() == torch.version.cuda


def test_a_missing_and_an_unpinned_package_end_the_build(installed):
    installed({name: f"{version}+cu130" for name, version in BASE.items()})

    assert VERSIONS.problems(["tqdm", "mine"], PINS, "13.0") == [
        "tqdm 4.70.1 is not installed",
        f"mine has no version in {ROOT}/docker/constraints.txt",
    ]


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
    wheels = dict(PINS)
    sources = {name: wheels.pop(name) for name, file in NAMES.items() if file in SOURCE_ONLY}
    questions = [(name, version, True) for name, version in wheels.items()]
    questions += [(name, version, False) for name, version in sources.items()]

    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda question: offered(question[0], wheels=question[2]), questions)

    missing = [f"{name}=={version}" for (name, version, _), found in zip(questions, answers, strict=True)
               if version not in found]  # fmt: skip
    assert not missing
