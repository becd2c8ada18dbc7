"""The check of a job's teacher: of its files, as of any model. The trainer compares its tokens with the policy's."""

from onbeat.config import JobConfig
from services.broker.admission.model_files import Complaint
from services.broker.admission.models import review_model


def review_teacher(config: JobConfig, has_model_folders: bool) -> list[Complaint]:
    """Return complaints about the job's teacher. `has_model_folders`: the trainers' folders can be seen from here."""
    if config.teacher is None:
        return []
    # It sees the prompts as the policy's template makes them, and needs none of its own.
    as_policy = config.model.model_copy(update={"path": config.teacher.path, "chat_template": ""})
    complaints = review_model(config.model_copy(update={"model": as_policy}), has_model_folders)
    return [(field.replace("model.path", "teacher.path"), message) for field, message in complaints]
