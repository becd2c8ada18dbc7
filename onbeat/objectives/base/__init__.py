"""The parts of objectives. Read `objective.py` first: what the trainer asks for, and what most objectives share."""

from onbeat.objectives.base.inputs import Logprobs, Loss, LossInputs, Responses, Tensor, ratio_of
from onbeat.objectives.base.objective import Normalization, Objective, PolicyObjective, TokenLoss

__all__ = [
    "Logprobs",
    "Loss",
    "LossInputs",
    "Normalization",
    "Objective",
    "PolicyObjective",
    "Responses",
    "Tensor",
    "TokenLoss",
    "ratio_of",
]
