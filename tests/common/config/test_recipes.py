"""What recipes say, and what Hydra knows of them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_type_hints

import pytest
import yaml

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import CONFIGS, compose
from common.config.workload_files import MAPPINGS
from common.errors import ConfigError


@pytest.fixture(scope="module", params=sorted(WORKLOADS))
def composed(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Name of a workload and what is composed for its ``test`` recipe."""
    return request.param, compose([f"benchmark={request.param}", "scale=test"])


def test_recipes_have_every_key_of_a_section_so_that_an_override_needs_no_plus(composed):
    name, tree = composed
    sections = get_type_hints(cli.workload_class(name).config_type)
    sections.pop("facts")
    assert sections
    for section, kind in sections.items():
        assert set(tree[section]) == {item.name for item in dataclasses.fields(kind)}, section


def test_an_implementation_that_no_recipe_names_is_auto(composed):
    _, tree = composed
    model = {key: value for key, value in tree["model"].items() if key != "implementations"}
    run, _ = cli.load({**tree, "model": model})
    assert set(run.workload.model.implementations.values()) == {"auto"}


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_only_the_base_of_a_workloads_recipes_has_auto(name):
    # `micro_batch: auto` is no implementation: the free memory decides.
    text = (CONFIGS / "recipe" / f"{name}.yaml").read_text()
    lines = [
        line
        for section in re.split(r"^(?=\w)", text, flags=re.MULTILINE)
        if not section.startswith("base:")
        for line in section.splitlines()
        if re.search(r"\bauto\b", line.partition("#")[0]) and line.strip() != "micro_batch: auto"
    ]
    assert lines == []


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("group", sorted(MAPPINGS))
def test_no_two_entries_of_a_file_are_equal(group, name):
    entries = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())[MAPPINGS[group]]
    texts = [repr(entry) for entry in entries.values() if not isinstance(entry, str)]
    assert texts
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_set_of_hyperparameters_has_a_source(name):
    sets = yaml.safe_load((CONFIGS / "hparams" / f"{name}.yaml").read_text())["sets"]
    sources = [entry["source"] for entry in sets.values()]
    assert len(set(sources)) == len(sources)


def test_the_base_of_a_workloads_recipes_is_no_scale():
    with pytest.raises(ConfigError, match=r"^scale=base: unknown; bert has .*8xH200"):
        compose(["benchmark=bert", "scale=base"])
