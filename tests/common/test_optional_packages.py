"""A package that is installed and cannot be imported is a reason for the next implementation, and no traceback."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common import optional_packages
from common.errors import ConfigError, UnsupportedImplementation
from common.observe.metrics import TENSORBOARD, _summary_writer
from common.ops.attention import ATTENTION
from common.ops.batch_norm import BATCH_NORM
from common.ops.causal_attention import CAUSAL_ATTENTION
from common.ops.convolution import CONVOLUTION
from common.ops.dense_attention import DENSE_ATTENTION
from common.ops.group_norm import GROUP_NORM
from common.ops.linear import LINEAR
from common.ops.operation import OperationRequest
from common.optional_packages import OptionalPackage, broken_packages
from tests.conftest import ROOT

IMPORTED = "imported.txt"
BREAKAGES = {
    "a requirement is missing": "import cutlass_that_is_not_here",
    "a library does not load": "raise OSError('libcute.so: undefined symbol: _ZN5torch')",
    "another version of a requirement": "raise TypeError('Descriptors cannot be created directly')",
    "incomplete": "",
}
"""Kinds of broken packages, and the first line of their modules."""

SIZES = {
    "head_size": 64, "head_dim": 64, "queries": 64, "keys": 64, "columns": 64, "channels": 320, "groups": 32,
}  # fmt: skip
BROKEN = [
    (CAUSAL_ATTENTION, "flash_attention_4", "flash-attn-4", "flash_attn/cute/interface", torch.bfloat16),
    (CAUSAL_ATTENTION, "cudnn_frontend", "nvidia-cudnn-frontend", "cudnn", torch.bfloat16),
    (DENSE_ATTENTION, "cudnn_frontend", "nvidia-cudnn-frontend", "cudnn", torch.bfloat16),
    (ATTENTION, "te", "transformer-engine", "transformer_engine/pytorch", torch.bfloat16),
    (LINEAR, "te", "transformer-engine", "transformer_engine/pytorch", torch.bfloat16),
    (CONVOLUTION, "cudnn", "nvidia-cudnn-frontend", "cudnn", torch.float16),
    (GROUP_NORM, "apex", "apex with --group_norm", "apex/contrib/group_norm", torch.float16),
    (BATCH_NORM, "triton", "triton", "triton", torch.float16),
]
"""Operation, implementation, package, the module that breaks, and a dtype that the implementation takes."""
BROKEN_IDS = [f"{operation.name}-{name}" for operation, name, *_ in BROKEN]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """A function that installs a package, and a GPU that every library supports. Nothing else is importable."""
    optional_packages._import_all.cache_clear()
    monkeypatch.setattr(optional_packages, "_broken", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    tops = {package.partition("/")[0] for _, _, _, package, _ in BROKEN} | {"group_norm_cuda", "tensorboard"}
    for name in list(sys.modules):
        if name.partition(".")[0] in tops:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])

    def make(package: str, module: str, source: str) -> None:
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        note = f"open({str(tmp_path / IMPORTED)!r}, 'a').write({module!r} + '\\n')"
        path.write_text(f"{note}\n{source}\n")
        information = tmp_path / f"{package.replace('-', '_')}-4.0.0b36.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 4.0.0b36\n")
        importlib.invalidate_caches()

    yield make
    optional_packages._import_all.cache_clear()
    for name in list(sys.modules):
        if name.partition(".")[0] in tops and str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def imports(folder: Path) -> list[str]:
    """Modules of installed packages whose import was tried."""
    log = folder / IMPORTED
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("breakage", list(BREAKAGES))
@pytest.mark.parametrize(("operation", "name", "package", "module", "dtype"), BROKEN, ids=BROKEN_IDS)
def test_a_broken_package_is_the_reason_for_the_next_choice(
    operation, name, package, module, dtype, breakage, install, tmp_path
):
    install(package, module, BREAKAGES[breakage])
    request = OperationRequest(torch.device("cuda"), dtype, SIZES)
    with pytest.raises(UnsupportedImplementation, match=f"{package} is installed, but importing") as refused:
        operation.select(name, request)
    assert BREAKAGES[breakage].partition("'")[2].rstrip("')") in str(refused.value)
    assert broken_packages() == [str(refused.value).partition(": ")[2]]
    if operation.fast[name].automatic:
        assert operation.select("auto", request).name != name
    assert imports(tmp_path) == [module], "a process tries the import once"


def test_a_package_that_is_not_there_is_not_called_broken(install):
    request = OperationRequest(torch.device("cuda"), torch.bfloat16, SIZES)
    with pytest.raises(UnsupportedImplementation, match="flash-attn-4 is not installed"):
        CAUSAL_ATTENTION.select("flash_attention_4", request)
    assert broken_packages() == []


def test_a_package_without_one_of_its_modules_is_broken(install, tmp_path):
    install("some-package", "somewhere", "")
    package = OptionalPackage("some-package", ("somewhere.inside:name",))
    assert "is installed, but importing somewhere.inside fails" in str(package.unavailable())


def test_another_version_is_refused_before_it_is_imported(install, tmp_path):
    install("flash-attn-4", "flash_attn/cute/interface", "")
    package = OptionalPackage("flash-attn-4", ("flash_attn.cute.interface",), version="4.0.0b99")
    assert package.unavailable() == "flash-attn-4 4.0.0b36 is installed, and the suite works with 4.0.0b99 only"
    assert imports(tmp_path) == []


@pytest.mark.parametrize(("operation", "name", "package", "module", "dtype"), BROKEN, ids=BROKEN_IDS)
def test_a_request_that_a_library_cannot_serve_imports_nothing(
    operation, name, package, module, dtype, install, tmp_path, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(package, module, BREAKAGES["a library does not load"])
    for device, asked in (("cpu", dtype), ("cuda", torch.int8)):
        with pytest.raises(UnsupportedImplementation):
            operation.select(name, OperationRequest(torch.device(device), asked, SIZES))
    assert imports(tmp_path) == []


def test_broken_tensorboard_is_a_configuration_error(install, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    install("tensorboard", "tensorboard", BREAKAGES["another version of a requirement"])
    with pytest.raises(ConfigError, match="Descriptors cannot be created directly"):
        _summary_writer(tmp_path)
    assert broken_packages() == [TENSORBOARD.unavailable()]


def test_commands_that_need_no_gpu_import_no_optional_package(tmp_path):
    for name in ("apex", "cudnn", "flash_attn", "transformer_engine"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(77)\n")
    done = subprocess.run(
        [sys.executable, "-m", "common.cli", "train", "benchmark=llama31_8b", "scale=8xH200", "--cfg", "job"],
        cwd=ROOT, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
