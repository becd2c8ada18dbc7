"""The lines of a TOML text that its fields are on."""

import time
from itertools import islice, product
from string import ascii_letters

import pytest

from services.broker.api.toml_body import MalformedToml, line_of, lines_of, parse

JOB = '''# a comment with """
name = "a"  # another

[data]
options = { min = 1 }
prompt = """
two
lines"""
operators = [
  "name = 5",
  "-",
]

[[tracking]]
type = "wandb"

[[tracking]]
type = "mlflow"
tags.run = "x"

[objective.kl]
coef = 0

[[evaluation.sets]]
[[evaluation.sets]]
[[evaluation.sets.reward]]
[evaluation.sets.reward.options]
pattern = 'x = 5'
'''


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("name", 2),
        ("data", 4),
        ("data.options", 5),
        ("data.options.min", 5),
        ("data.prompt", 6),
        ("data.operators", 9),
        ("data.operators.1", 9),
        ("tracking.0.type", 15),
        ("tracking.1", 17),
        ("tracking.1.type", 18),
        ("tracking.1.tags.run", 19),
        ("tracking.1.tags.other", 19),  # missing: the table that begins there
        ("objective.kl.coef", 22),
        ("objective.kl.estimator", 21),  # missing: its section
        ("evaluation.sets.1.reward.0.options.pattern", 28),
        ("model.path", None),
    ],
)
def test_field_has_the_line_it_is_written_on(field, line):
    assert line_of(field, lines_of(JOB)) == line


@pytest.mark.parametrize(
    "above",
    [
        'a = 1  # as in """',
        "a = \"'''\"",
        """a = '\"\"\"'""",
        'a = """one\n\\""" "quoted\\\\""""',
        "a = '''one\n[reward]\n'''",
        'a = [\n  ["x", "#"],\n]',
        "a = [\n  [0.5],\n]",
    ],
)
def test_value_hides_no_line_below_it(above):
    last = 3 + above.count("\n")
    assert lines_of(f"[reward]\n{above}\nname = 'exact'") == {"reward": 1, "reward.a": 2, "reward.name": last}


HOSTILE = {
    "long text": ("name = '" + "a" * 65_000 + "'", ""),
    "long text without an end": ("name = " + "a" * 65_000, "Invalid value"),
    "parts in quotes": ("[" + ".".join(['"="'] * 7500) + "]\nx = 1", "more than 32 parts"),
    "plain parts": ("[" + ".".join("a" * 33) + "]", "more than 32 parts"),
    "just few enough parts": ("[" + ".".join("a" * 32) + "]", ""),
    "quotes": ('x = """' + "'" * 65_000 + '"""', ""),
    "quotes without an end": ('" ' * 32_000, "Expected"),
    "spaces": ("a" + " " * 65_000 + "= 1", ""),
    "words": ("a " * 32_000, "Expected"),
    "arrays": ("\n".join(f"[[{''.join(name)}]]" for name in islice(product(ascii_letters, repeat=3), 8_000)), ""),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_text_takes_seconds_to_be_read(kind):
    text, problem = HOSTILE[kind]
    started = time.process_time()
    if problem:
        with pytest.raises(MalformedToml, match=problem):
            parse(text)
    else:
        parse(text)
    lines_of(text)
    assert time.process_time() - started < 2.0
