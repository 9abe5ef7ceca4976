"""A command that a hint names is about the instance that the hint was given for."""

import re
from pathlib import Path

import pytest

import wcache
from wcache.hints import for_instance, instance_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("wcache down frees it", "wcache down --instance a frees it"),
        ("wcache warm, with the same --model", "wcache warm --instance a, with the same --model"),
        ("wcache status shows it, wcache logs 0 more",
         "wcache status --instance a shows it, wcache logs --instance a 0 more"),
        ("wcache restart a:3 keeps it", "wcache restart a:3 keeps it"),
        ("wcache run -- COMMAND", "wcache run --instance a -- COMMAND"),
        ("wcache down --instance b frees it", "wcache down --instance b frees it"),
        ("wcache down, without --instance", "wcache down, without --instance"),
        ("wcache install; wcache.publish too", "wcache install; wcache.publish too"),
    ],
)  # fmt: skip
def test_commands_of_a_hint_name_the_instance(hint: str, told: str) -> None:
    assert for_instance(hint, "a") == told
    assert for_instance(hint, "") == hint


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("status", ""), ("status --instance a", "a"), ("run --instance=a -- x --instance b", "a"),
        ("run -- x --instance b", ""), ("restart a:3 a:4", "a"), ("down 3", ""),
        ("status --instance", ""), ("run torchrun --rdzv-endpoint localhost:29500 x", ""),
        ("fingerprint m --running a:3", "a"),
    ],
)  # fmt: skip
def test_the_instance_is_that_of_the_command_and_not_of_its_engine(line: str, name: str) -> None:
    assert instance_of(line.split()) == name


def test_no_hint_has_options_of_up_without_its_model() -> None:
    """They are refused: without a model, the configuration says all of it."""
    option = re.compile(r"wcache up --(?!model\b|instance\b|timeout\b|quiet\b)[a-z]")
    root = Path(wcache.__file__).parent
    told = {path.name: option.findall(path.read_text()) for path in root.rglob("*.py")}
    assert {name: found for name, found in told.items() if found} == {}
