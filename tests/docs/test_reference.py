"""Hand-written reference pages name everything that they are about."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import specdec
from specdec.cli import defaults_from
from specdec.types import StepRecord

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def rows_of(page: str) -> set[str]:
    """Names in the first column of the page's tables."""
    return set(re.findall(r"^\| `(\w+)`", (REFERENCE / page).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_argument_of_generate_is_described():
    parameters = inspect.signature(specdec.generate).parameters.values()
    ours = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "streamer"}
    assert ours <= rows_of("configuration.md")


def test_every_field_of_a_step_record_is_described():
    assert {field.name for field in dataclasses.fields(StepRecord)} == rows_of("step-record.md")


def test_every_variable_of_the_environment_is_described():
    read = set(re.findall(r'"([A-Z][A-Z_]+)"', inspect.getsource(defaults_from)))
    assert read and read == rows_of("environment.md")
