"""The step that a trainer is at, in words for the job's user."""

from collections.abc import Callable


class Status:
    """The words for what the trainer does now: each step of the training calls its own method here when it begins.

    The next heartbeat reports `doing`; `on_step` is called at the beginning of each step.
    """

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self.doing = "loading the model"
        self._on_step = on_step

    def _begin(self, doing: str) -> None:
        self.doing = doing
        self._on_step()

    def compile_kernels(self) -> None:
        self._begin("compiling its kernels")

    # ---- an iteration --------------------------------------------------------------------------------------------

    def wait_for_groups(self, iteration: int, num_missing: int) -> None:
        self._begin(f"waiting for groups of iteration {iteration}: {num_missing} missing")

    def wait_for_rows(self, iteration: int) -> None:
        self._begin(f"waiting for the rows of iteration {iteration}, and tokenising them")

    def train(self, iteration: int) -> None:
        self._begin(f"training iteration {iteration}")

    def enter_barrier(self, iteration: int) -> None:
        self._begin(f"at the barrier of iteration {iteration}: sum over replicas and optimizer step")

    def make_version(self, version: int) -> None:
        self._begin(f"making policy version {version} of the weights")

    def publish(self, version: int) -> None:
        self._begin(f"publishing policy version {version}")

    def commit(self, iteration: int) -> None:
        self._begin(f"committing iteration {iteration}")

    def wait_for_evaluation(self, evaluation: int) -> None:
        self._begin(f"waiting for evaluation {evaluation}, before the weights change")

    def end(self, has_evaluation: bool) -> None:
        self._begin("waiting for the last evaluation" if has_evaluation else "ending the job")

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def wait_for_reader(self) -> None:
        self._begin("waiting until the last checkpoint has read the optimizer's state")

    def write_checkpoint(self, num_iterations: int) -> None:
        self._begin(f"writing the checkpoint after {num_iterations} iterations")

    def write_last_checkpoint(self, num_iterations: int) -> None:
        self._begin(f"writing a checkpoint after {num_iterations} iterations, to stop there")

    def wait_for_checkpoint(self, num_iterations: int) -> None:
        self._begin(f"waiting until the checkpoint after {num_iterations} iterations is on disk")

    def wait_for_disk_space(self, problem: object, next_try: int, num_tries: int, retry_s: float) -> None:
        self._begin(f"waiting for disk space: {problem} (try {next_try} of {num_tries} in {retry_s:.0f} s)")
