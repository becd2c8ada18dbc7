"""The errors of transformers' models that are built in an unexpected way."""

from huggingface_hub.errors import StrictDataclassError

TRIAL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
