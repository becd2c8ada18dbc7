"""`python -m services.trainer.vocabularies MODEL TEACHER` says whether a teacher has the tokens of a model.

It writes one line, `{"problem": "..."}`: a sentence with a remedy, or '' if there is none. The broker runs it before a
job is created, and the trainer compares again when the job starts.
"""

import json
import resource
import sys
from collections.abc import Mapping
from typing import Any

from onbeat.process.confine import MEBIBYTE, die_with_parent, lower_limits
from services.prompts.tokenizer import load_tokenizer
from services.trainer.model.bundled import resolve_model
from services.trainer.settings import Settings

Vocabulary = Mapping[int, str]  # tokens by their ids

MEMORY_MB = 8192


def vocabulary_of(source: str) -> Vocabulary:
    """Return the tokens of a model by their ids. Raises ValueError where its tokenizer cannot be loaded."""
    try:
        return {token_id: token for token, token_id in load_tokenizer(source).get_vocab().items()}
    except OSError as error:
        raise ValueError(f"the tokenizer of {source} cannot be loaded: {error}") from error


def shared_ids(student: Vocabulary, teacher: Vocabulary) -> list[int]:
    """Return the ids that both have, ascending. Raises ValueError if one of them is another token."""
    shared = sorted(student.keys() & teacher.keys())
    different = [token_id for token_id in shared if student[token_id] != teacher[token_id]]
    if different:
        first = different[0]
        raise ValueError(
            f"it has another vocabulary than the model: {len(different)} of {len(shared)} shared ids are other tokens, "
            f"such as {first}, which is {teacher[first]!r} there and {student[first]!r} in the model; take a teacher "
            "with the model's tokenizer"
        )
    return shared


def main() -> None:
    die_with_parent()
    lower_limits({resource.RLIMIT_AS: MEMORY_MB * MEBIBYTE})
    try:
        sources = [resolve_model(path, Settings().cache_dir) for path in sys.argv[1:3]]
        modules: dict[str, Any] = sys.modules
        modules.setdefault("torch", None)  # tokenizers do without it, and it takes long to import
        student, teacher = map(vocabulary_of, sources)
    except ValueError as error:
        sys.exit(str(error))
    try:
        shared_ids(student, teacher)
        problem = ""
    except ValueError as error:
        problem = str(error)
    sys.stdout.write(json.dumps({"problem": problem}) + "\n")


if __name__ == "__main__":
    main()
