"""Podman under the name of docker, and an image that is built from nothing but package mirrors.

Images and containers lie below one temporary folder, which is removed at the end.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

PROGRAMS = ("podman", "buildah", "debootstrap")
"""Required programs; Debian and Ubuntu have them in packages of these names. ``runc`` too where cgroups are hybrid."""

FREE_BYTES = 10e9
"""Space for the base image, the family's image, and what pip unpacks."""

BUILD_SECONDS = 3000
SECONDS = 1000
CERTIFICATES, PIP, APT = "/mnt/certificates.crt", "/etc/pip.conf", "/etc/apt/apt.conf.d/90machine"
"""Places in a build for the machine's certificate authorities, and for its settings of pip and apt."""


def obstacle(wheelhouse: Path) -> str | None:
    """Return why no image can be built here, as a message; None if it can."""
    if os.getuid():
        return "building the base image needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (apt-get install {' '.join(missing)} runc)"
    if not (wheelhouse / "BUNDLE").is_file():
        return f"{wheelhouse} is no wheelhouse (make wheelhouse)"
    if (free := shutil.disk_usage(tempfile.gettempdir()).free) < FREE_BYTES:
        return f"{tempfile.gettempdir()} has {free / 1e9:.1f} GB free, and {FREE_BYTES / 1e9:g} are needed (TMPDIR)"
    return None


@dataclass(frozen=True)
class Built:
    """An image.

    Attributes:
        name: name with tag.
        log: output of the build.
    """

    name: str
    log: str


class Engine:
    """Images and containers of these tests.

    Attributes:
        folder: folder of everything, images included.
        isolation: why containers cannot run here, in which case builds and programs run in a chroot; else empty.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlperf-containers-"))
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder}/images"\nrunroot = "{self.folder}/run"\n'
        )
        # crun, podman's default, refuses hybrid cgroups.
        runtime = 'runtime = "runc"\n' if shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin") else ""
        (self.folder / "containers.conf").write_text(
            f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        docker = self.folder / "bin" / "docker"
        docker.parent.mkdir()
        docker.write_text('#!/bin/sh\nexec podman "$@"\n')
        docker.chmod(0o755)
        self.environment = {
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "PATH": f"{docker.parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "TMPDIR": str(self.folder),  # by default layers are copied through /var/tmp
        }
        self.isolation = self._why_no_container_runs()
        if self.isolation:
            self.environment["BUILDAH_ISOLATION"] = "chroot"

    def build_base(self, image: str, wheelhouse: Path) -> list[str]:
        """Build the base image of docker/debian_base.sh; return the options of docker/build.sh for it."""
        done = self.command(["docker/debian_base.sh", image, str(wheelhouse)], seconds=BUILD_SECONDS)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()

    def build(self, family: str, options: Sequence[str]) -> Built:
        """Build a family's image from the repository, with this machine's mirrors and certificates."""
        done = self.command(
            ["docker/build.sh", family, *options, "--network", "host", *self.settings_of_machine()],
            seconds=BUILD_SECONDS, DOCKER="podman",
        )  # fmt: skip
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-4000:]
        (name,) = [line.rpartition(" ")[2] for line in log.splitlines() if line.startswith("Successfully tagged")]
        return Built(name, log)

    def build_stage(self, stage: str, name: str, options: Sequence[str]) -> Built:
        """Build the Dockerfile up to a stage, with the options of docker/build.sh."""
        target = ["--format", "docker", "--file", "docker/Dockerfile", "--target", stage, "--tag", name]
        done = self.command(
            ["podman", "build", *target, *options, "--network", "host", *self.settings_of_machine(), "."],
            seconds=BUILD_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return Built(name, done.stdout + done.stderr)

    def docker(self, *arguments: str, seconds: float = SECONDS) -> str:
        """Return the output of a docker command, which must succeed."""
        done = self.command(["docker", *arguments], seconds=seconds)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def run(self, image: str, program: Sequence[str], options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a program in a container, or in a chroot; ``options`` are those of ``docker run`` and ``buildah run``."""
        if self.isolation:
            container = self.command(["buildah", "from", image]).stdout.strip()
            try:
                return self.command(["buildah", "run", *options, container, "--", *program])
            finally:
                self.command(["buildah", "rm", container])
        # Podman writes a file "oom" to the current folder when the kernel has killed the container for its memory.
        command = ["docker", "run", "--rm", "--no-healthcheck", *_reachable_limits(), *options, image, *program]
        return self.command(command, cwd=self.folder)

    def inspect(self, image: str) -> dict[str, Any]:
        """Return what the engine knows of an image."""
        (facts,) = json.loads(self.docker("image", "inspect", image))
        return dict(facts)

    def command(
        self, command: Sequence[str], seconds: float = SECONDS, cwd: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, in the repository by default, with this engine's podman as docker."""
        return subprocess.run(
            command, cwd=cwd, env=self.variables(environment), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def variables(self, further: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program that uses this engine."""
        return {**os.environ, **self.environment, **further}

    def settings_of_machine(self) -> list[str]:
        """Return options that give a build this machine's certificates, package index and proxies of apt."""
        volumes = {}
        authorities = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
        settings = ["[global]"]
        if authorities and Path(authorities).is_file():
            volumes[CERTIFICATES] = authorities
            settings.append(f"cert = {CERTIFICATES}")
        for name in ("index-url", "proxy", "trusted-host"):
            found = self.command(["python3", "-m", "pip", "config", "get", f"global.{name}"]).stdout.strip()
            settings += [f"{name} = {found}"] if found else []
        apt = self.command(["apt-config", "dump", "--format", "%F \"%v\";%n", "Acquire::http::Proxy",
                            "Acquire::https::Proxy"]).stdout  # fmt: skip
        for place, text in ((PIP, "\n".join(settings) + "\n"), (APT, apt)):
            path = self.folder / Path(place).name
            path.write_text(text)
            volumes[place] = str(path)
        return [word for place, path in volumes.items() for word in ("--volume", f"{path}:{place}:ro")]

    def close(self) -> None:
        """Remove all containers and images, and the folder."""
        self.command(["podman", "rm", "--all", "--force", "--time", "0"])
        self.command(["buildah", "rm", "--all"])
        self.command(["podman", "rmi", "--all", "--force"])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _why_no_container_runs(self) -> str:
        """Try a container whose root folder has one program; return podman's complaint, or nothing."""
        root = self.folder / "probe"
        (root / "bin").mkdir(parents=True)
        true = shutil.which("true")
        assert true is not None
        for path in (true, *_libraries(Path(true))):
            place = root / Path(path).relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        done = self.command(
            ["podman", "run", "--rm", "--network=host", *_reachable_limits(), "--rootfs", str(root), true]
        )
        return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]


def _reachable_limits() -> list[str]:
    """Return options with limits below those that podman asks for by default, which not every root may raise."""
    files = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return [f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096"]


def _libraries(program: Path) -> list[str]:
    """Return the shared libraries of a program, with the dynamic loader."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
