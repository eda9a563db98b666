"""Images of more families, which take too long for every change: ``make images``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.containers.engine import Built, Engine

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(8000)]


@pytest.mark.parametrize("family", ["speech", "graph"])
def test_an_image_without_compiled_libraries_is_built_whole(
    engine: Engine, build: Callable[[str], Built], family: str
) -> None:
    done = engine.run(build(family).name, ["mlperf-suite", "list"])
    assert done.returncode == 0, done.stderr


def test_the_image_with_dali_is_built_whole(engine: Engine, build: Callable[[str], Built]) -> None:
    image = build("vision")
    done = engine.run(image.name, ["python3", "-c", "import nvidia.dali, cudnn; print(nvidia.dali.__version__)"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.4.")


def test_stages_up_to_the_compiler_are_built_and_all_wheels_can_be_had(
    engine: Engine, base: list[str], say: Callable[[str], None]
) -> None:
    """Compiling apex and Transformer Engine's extension needs NVIDIA's compiler and apex's source."""
    stages = engine.build_stage("compiler", "mlperf-suite:compiler", base)
    assert stages.log.count("COMMIT") > 0
    say(f"{stages.name}: {engine.inspect(stages.name)['Size'] / 1e9:.1f} GB")
    files = ("transformer_engine.txt", "flash_attention_4.txt", "cudnn.txt", "dali.txt")
    named = [word for file in files for word in ("--requirement", f"/opt/mlperf-suite/requirements/{file}")]
    pip = ["python3", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", "/tmp", *named]
    done = engine.run(stages.name, pip, ["--network", "host", *engine.settings_of_machine()])
    assert done.returncode == 0, done.stdout + done.stderr
    say(done.stdout.strip().splitlines()[-1])
