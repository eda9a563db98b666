"""Limits of ``configs/system`` and of a file, and errors in them."""

import pytest

from common.doctor.limits import CONFIGS, Limit, load_system
from common.errors import ConfigError

SYSTEMS = sorted(path.stem for path in (CONFIGS / "system").glob("*.yaml"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_its_name_and_limits(name):
    system, limits = load_system(name)
    assert system.name == name
    assert limits["gpu.xid_hardware"] == Limit(max=0.0)


def test_a_system_adds_its_limits_to_those_of_all_machines():
    _, limits = load_system("h200")
    assert limits["node.shared_memory_gb"] == load_system("auto")[1]["node.shared_memory_gb"]
    assert limits["gpu.nvlinks_active"] == Limit(min=18.0)
    assert limits["node.clock_offset_ms"] == Limit(max=50.0)


def write(folder, text):
    path = folder / "site.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_limits(tmp_path):
    text = "limits: {gpu: {memory_copy_gbs: {min: 3000, spread: 2.5}}, node: {open_files: {min: 65536}}}"
    system, limits = load_system(write(tmp_path, text))
    assert limits == {"gpu.memory_copy_gbs": Limit(min=3000.0, spread=2.5), "node.open_files": Limit(min=65536.0)}
    assert system.environment == {}


@pytest.mark.parametrize("text", ["environment: {NCCL_DEBUG: WARN}", "limits: {gpu: null}", ""])
def test_a_file_without_limits_has_none(tmp_path, text):
    assert load_system(write(tmp_path, text))[1] == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("limits: {gpu: {memory_copy: {min: 3000}}}", r"gpu\.memory_copy: unknown; the figures are .*memory_copy_gbs"),
        ("limits: {rack: {}}", r"system\.limits\.rack: unknown; limits are of gpu, node, job"),
        ("limits: {gpu: {memory_copy_gbs: 3000}}", r"memory_copy_gbs: expected a section of keys, got 3000"),
        ("limits: {gpu: {memory_copy_gbs: {least: 3000}}}", r"memory_copy_gbs\.least: unknown key"),
        ("limits: {gpu: {memory_copy_gbs: {min: much}}}", r"memory_copy_gbs\.min=much: expected float"),
        ("limits: {gpu: [1]}", r"system\.limits\.gpu=\[1\]: expected a section"),
        ("limit: {}", r"system\.limit: unknown key"),
        ("limits: {gpu", "is no valid YAML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_an_error_that_names_the_key(tmp_path, text, named):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=named):
        load_system(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"--system .*nothing\.yaml: cannot be read: No such file"):
        load_system(str(tmp_path / "nothing.yaml"))


def test_an_unknown_system_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"--system b200: unknown; the systems are auto, .*h200"):
        load_system("b200")
