"""The base of a job's sections: unknown keys are refused, and true is not the number 1."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def refuse_boolean(value: Any) -> Any:
    """Raise ValueError for a boolean, as to Python true is the number 1."""
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(refuse_boolean)]
Float = Annotated[float, BeforeValidator(refuse_boolean)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(refuse_boolean)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(refuse_boolean)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), BeforeValidator(refuse_boolean)]


AUTO, NUMBER = "[auto]", "[number]"  # forms of a value, in the locations of Pydantic's errors
IS_ACCEPTED = {"is_accepted": True}  # context of a validation: the job has been checked, and is only read


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
