"""YAML that users write: a mistake is one message with file and line, and no key is given twice."""

import pytest

from common.config.composition import compose
from common.config.yaml_files import load_yaml
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 1", r"^file\.yaml, line 3: is no valid YAML: the key 'a' is given twice; remove one$"),
        ("x:\n- {a: 1, 'a': 2}", "line 2: .*the key 'a' is given twice"),
        ("1: a\n1: b", "line 2: .*the key '1' is given twice"),
        ("base: &base {a: 1}\nx: {<<: *base, b: 1, b: 2}", "line 2: .*the key 'b' is given twice"),
        ("a: [", "line 1: is no valid YAML"),
        ("a: 1\n b: 2", "line 2: is no valid YAML: mapping values are not allowed here"),
        ("a: \0", "is no valid YAML: .*special characters are not allowed"),
        ("2026-13-45", "is no valid YAML: month must be in 1..12"),
        ("[" * 5000, "is no valid YAML: maximum recursion depth"),
    ],
    ids=["top", "list", "number", "merged", "end", "indent", "null byte", "date", "depth"],
)
def test_a_mistake_is_named_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        load_yaml(text, "file.yaml")


def test_an_exponent_needs_no_sign_and_no_point():
    assert load_yaml("[2.6e6, 1e-3, -5E2, 2.6e+6, 12, e6, 1e]", "file.yaml") == [
        2.6e6,
        1e-3,
        -500,
        2.6e6,
        12,
        "e6",
        "1e",
    ]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("{a: 1, A: 2}", {"a": 1, "A": 2}),
        ("{x: {a: 1}, y: {a: 1}}", {"x": {"a": 1}, "y": {"a": 1}}),
        ("base: &base {a: 1}\nx: {<<: *base, a: 2}\ny: {<<: *base}", {"base": {"a": 1}, "x": {"a": 2}, "y": {"a": 1}}),
    ],
    ids=["case", "two sections", "merged key"],
)
def test_keys_that_differ_or_override_a_merged_one_are_taken(text, content):
    assert load_yaml(text, "file.yaml") == content


def test_a_configuration_with_a_key_twice_is_one_message(tmp_path):
    (tmp_path / "hparams").mkdir()
    (tmp_path / "hparams" / "own.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(ConfigError, match=r"hparams/own\.yaml, line 2: is no valid YAML: found duplicate key a"):
        compose(["benchmark=resnet", "scale=test", f"hydra.searchpath=[file://{tmp_path}]", "hparams=own"])
