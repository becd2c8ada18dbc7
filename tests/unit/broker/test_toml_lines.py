"""The lines of a TOML text that its fields are on."""

import pytest

from services.broker.api.toml_body import line_of, lines_of

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
def test_field_has_the_line_it_is_written_on(field: str, line: int | None) -> None:
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
def test_value_hides_no_line_below_it(above: str) -> None:
    last = 3 + above.count("\n")
    assert lines_of(f"[reward]\n{above}\nname = 'exact'") == {"reward": 1, "reward.a": 2, "reward.name": last}
