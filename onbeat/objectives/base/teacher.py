"""On-policy distillation: the policy samples, and a frozen teacher says of each token how likely it would have been.

    g_t = trainer_logprobs - teacher_logprobs, clipped to [-clip, clip]                                   detached
    sampled_token      A_t = A - coef g_t              A: the objective's own advantage, 0 with `type = "distill"`
    full_vocabulary    L_t = L + coef K_t,  K_t = sum over v of p(v) g(v),  d K_t / d logit(v) = p(v) (g(v) - K_t)

Both have the same expected gradient. Without a clip it is that of KL(policy || teacher) at each prefix by itself:
E[(log p - log q) grad log p] = grad KL. It is not the gradient of the divergence between whole responses, in which a
token also answers for the prefixes that it leads to; the discount for these is 0 here, as it is usual in the field.

A token that the teacher's vocabulary lacks has no term: its g is 0.
"""

from typing import Literal

from pydantic import Field

from onbeat.contracts.section import Float, Section
from onbeat.objectives.base.inputs import Lesson, Tensor


class TeacherConfig(Section):
    path: str = Field(
        min_length=1,
        description="model that the policy learns from, as in `model.path`; its tokens must be those of the model",
    )
    prompt_field: str | None = Field(
        None,
        min_length=1,
        exclude_if=lambda name: name is None,
        description="field of a row with the prompt that the teacher reads in place of the policy's, such as one with "
        "a hint or the answer; in the form of `data.prompt_field`; default: the policy's prompt",
    )
    coef: Float = Field(
        1.0,
        gt=0,
        le=1_000_000,
        description="factor of the log-probability gap (nats) that is subtracted from the advantage of each token",
    )
    clip: Float | None = Field(
        None, gt=0, description="largest gap of a token in either direction, in nats; default: no limit"
    )
    divergence: Literal["sampled_token", "full_vocabulary"] = Field(
        "sampled_token",
        description="sampled_token: the gap of the sampled token, as an advantage; full_vocabulary: the reverse KL "
        "over all tokens, as a term of the loss: the same gradient on average, with less noise and more computation",
    )

    def gap(self, log_ratio: Tensor, is_known: Tensor) -> Tensor:
        """Clip log p - log q; 0 where the teacher does not know the token."""
        gap = log_ratio.where(is_known, 0.0)
        return gap if self.clip is None else gap.clamp(-self.clip, self.clip)

    def lesson(
        self, trainer_logprobs: Tensor, teacher_logprobs: Tensor, is_known: Tensor, divergence: Tensor | None = None
    ) -> Lesson:
        """Return the terms of a micro-batch from the sampled tokens [N], all without gradient, or from their full
        `divergence` [N], which carries one."""
        log_ratio = (trainer_logprobs - teacher_logprobs).where(is_known, 0.0)
        gap = self.gap(log_ratio, is_known)
        metrics = {
            "teacher_gap": log_ratio,
            "teacher_clipped_frac": gap != log_ratio,
            "teacher_unknown_frac": ~is_known,
        }
        if divergence is None:
            return Lesson(-self.coef * gap, None, metrics)
        return Lesson(gap.new_zeros(gap.shape), self.coef * divergence, metrics | {"teacher_divergence": divergence})
