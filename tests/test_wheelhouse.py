"""Test scripts/wheelhouse.sh on a tiny project and package registry: a bundle is built, moved and installed."""

from __future__ import annotations

import ensurepip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAF = "leaf-1.0-py2.py3-none-any.manylinux1_x86_64.manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_5_x86_64.whl"
"""File name longer than the 100 characters that the oldest tar format supports."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
"""Environment without settings of pip, and of the ``make`` that may run these tests."""

BACKEND = """
import zipfile
from pathlib import Path

def build_wheel(directory, config_settings=None, metadata_directory=None):
    name, info = "mlperf_suite-1.2.3-py3-none-any.whl", "mlperf_suite-1.2.3.dist-info"
    with zipfile.ZipFile(Path(directory) / name, "w") as wheel:
        wheel.writestr("suite_stub.py", "import leaf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: mlperf-suite\\nVersion: 1.2.3\\n"
                       "Provides-Extra: dev\\nProvides-Extra: tensorboard\\nRequires-Dist: leaf; extra == 'dev'\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name

build_editable = build_wheel
"""
"""A build backend that needs no package, because setuptools may be missing where these tests run."""

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "mlperf-suite"
version = "1.2.3"
"""


@dataclass(frozen=True)
class Site:
    """A checkout, and the folder that acts as the package registry."""

    source: Path
    registry: Path

    def run(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script of the checkout, or of the folder ``cwd``."""
        folder = cwd or self.source
        return subprocess.run(
            ["bash", str(folder / "scripts" / "wheelhouse.sh"), *arguments],
            cwd=folder, env={**ENVIRONMENT, "PYTHON": sys.executable, **environment},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    def build(self) -> subprocess.CompletedProcess[str]:
        """Build the bundle from the local registry."""
        return self.run("build", PIP_NO_INDEX="1", PIP_FIND_LINKS=self.registry.as_uri())


def write_wheel(path: Path) -> None:
    """Write a wheel of version 1.0 with one empty module."""
    name = path.name.partition("-")[0]
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_site(folder: Path) -> Site:
    pips = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not pips or shutil.which("git") is None or shutil.which("make") is None:
        pytest.skip("needs git, make, and the pip that Python brings along")
    source, registry = folder / "source", folder / "registry"
    (source / "scripts").mkdir(parents=True)
    registry.mkdir()
    for name in (LEAF, "setuptools-1.0-py3-none-any.whl", "wheel-1.0-py3-none-any.whl"):
        write_wheel(registry / name)
    shutil.copy(pips[-1], registry)
    shutil.copy(ROOT / "scripts" / "wheelhouse.sh", source / "scripts")
    shutil.copy(ROOT / "Makefile", source)
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "backend.py").write_text(BACKEND)
    (source / "constraints.txt").write_text("leaf==1.0\n")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "one"]):
        subprocess.run(["git", "-C", source, *command], check=True, capture_output=True, timeout=200)
    return Site(source, registry)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return a site whose bundle has been built; its checkout has an uncommitted file."""
    made = make_site(tmp_path_factory.mktemp("site"))
    (made.source / "uncommitted.py").write_text("")
    done = made.build()
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def unpacked(site: Site, tmp_path: Path) -> Path:
    """Return the folder of the bundle, unpacked elsewhere."""
    (bundle,) = (site.source / "dist").iterdir()
    with tarfile.open(bundle) as tar:
        tar.extractall(tmp_path / "with space", filter="data")
    (folder,) = (tmp_path / "with space").iterdir()
    return folder


def rewrite(folder: Path, name: str, text: str) -> None:
    """Change a file of an unpacked bundle's wheelhouse, and its checksum."""
    file, sums = folder / "wheelhouse" / name, folder / "wheelhouse" / "SHA256SUMS"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(text)
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(file.read_bytes()).hexdigest()))


def test_a_bundle_holds_the_commit_and_its_packages(unpacked):
    wheels = sorted(file.name.partition("-")[0] for file in (unpacked / "wheelhouse").glob("*.whl"))

    assert unpacked.name == f"mlperf-suite-1.2.3-py{PYTHON}-{os.uname().machine}"
    assert wheels == ["leaf", "pip", "setuptools", "wheel"]
    assert (unpacked / "scripts" / "wheelhouse.sh").exists()


def test_a_bundle_leaves_uncommitted_files_out(unpacked):
    assert not (unpacked / "uncommitted.py").exists()


def test_a_bundle_installs_from_itself(site, unpacked):
    done = site.run("install", cwd=unpacked, PIP_INDEX_URL="http://127.0.0.1:9/nothing-here")

    assert done.returncode == 0, done.stderr
    subprocess.run([unpacked / ".venv" / "bin" / "python", "-c", "import suite_stub"], check=True, timeout=200)


def plan(folder: Path) -> str:
    """Return the commands of ``make -n lint`` in a folder without .venv."""
    return subprocess.run(
        ["make", "-n", "lint"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=True
    ).stdout


def test_make_installs_a_bundle_from_its_wheelhouse(unpacked):
    assert "scripts/wheelhouse.sh install wheelhouse .venv" in plan(unpacked)


def test_make_installs_a_checkout_from_the_registry(site):
    assert (site.source / "wheelhouse").exists()
    assert "wheelhouse.sh" not in plan(site.source)


def test_a_damaged_package_is_refused(site, unpacked):
    (unpacked / "wheelhouse" / LEAF).write_bytes(b"half")

    done = site.run("install", cwd=unpacked)

    assert done.returncode == 2
    assert f"{LEAF}: FAILED" in done.stdout
    assert "was damaged on its way" in done.stderr
    assert not (unpacked / ".venv").exists()


def test_a_missing_package_is_refused(site, unpacked):
    (unpacked / "wheelhouse" / LEAF).unlink()

    done = site.run("install", cwd=unpacked)

    assert done.returncode == 2
    assert LEAF in done.stderr


def test_a_bundle_for_another_python_is_refused(site, unpacked):
    text = (unpacked / "wheelhouse" / "BUNDLE").read_text()
    rewrite(unpacked, "BUNDLE", text.replace(f"python={PYTHON}", "python=2.1"))

    done = site.run("install", cwd=unpacked)

    assert done.returncode == 2
    assert done.stderr.startswith(f"wheelhouse.sh: the bundle is for Python 2.1, and {sys.executable} is {PYTHON}: ")
    assert done.stderr.count("\n") == 1


def test_a_package_of_another_platform_is_refused(site, unpacked):
    (unpacked / "wheelhouse" / "leaf-1.0-cp27-cp27m-win32.whl").write_bytes(b"")

    done = site.run("install", cwd=unpacked)

    assert done.returncode == 2
    assert "does not fit this machine: leaf-1.0-cp27-cp27m-win32.whl\n" in done.stderr


def test_a_folder_that_is_no_wheelhouse_is_refused(site, tmp_path):
    done = site.run("install", str(tmp_path))

    assert done.returncode == 2
    assert done.stderr == f"wheelhouse.sh: {tmp_path} is no wheelhouse: make wheelhouse fills one\n"


def test_a_source_without_git_makes_no_bundle(site, unpacked):
    done = site.run("build", cwd=unpacked)

    assert done.returncode == 2
    assert "is no git checkout: a bundle holds a commit" in done.stderr


def test_a_folder_of_other_things_is_not_replaced(site, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")

    done = site.run("build", str(tmp_path))

    assert done.returncode == 2
    assert done.stderr.endswith(f"{tmp_path} exists and is no wheelhouse: it is left as it is\n")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failed_download_leaves_nothing_behind(tmp_path):
    site = make_site(tmp_path)
    (site.registry / LEAF).unlink()

    done = site.build()

    assert done.returncode != 0
    assert "ERROR" in done.stderr
    assert not list(site.source.glob("wheelhouse*"))
    assert not list(site.source.glob("dist/*"))
