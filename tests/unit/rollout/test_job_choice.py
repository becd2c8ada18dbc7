"""The rule by which rollouts spread over the jobs of their pool: everybody applies it alone, to the same heartbeats."""

from hypothesis import given
from hypothesis import strategies as st

from onbeat.config import JobConfig
from onbeat.contracts.records import WorkerRecord
from services.rollout.choice import Candidate, choose_job, find_move
from tests.world import job_body


def job(job_id: str, num_prompts: int = 4, is_paused: bool = False, dtype: str = "float32") -> Candidate:
    body = job_body(model={"dtype": dtype}, rollout={"num_prompts_per_iteration": num_prompts})
    return Candidate(job_id, JobConfig.model_validate(body), is_paused)


def worker(worker_id: str, job_id: str | None = None, state: str = "idle") -> WorkerRecord:
    return WorkerRecord(id=worker_id, job_id=job_id, state=state, last_seen_at=0.0)


def settle(jobs: list[Candidate], workers: dict[str, str | None]) -> int:
    """Let everybody move by the rule, all looking at the same moment; returns the number of moves until nobody does."""
    num_moves = 0
    while True:
        records = [worker(worker_id, job_id) for worker_id, job_id in workers.items()]
        moves = {worker_id: find_move(jobs, records, worker_id) for worker_id in workers}
        due = {worker_id: to.job_id for worker_id, to in moves.items() if to is not None}
        assert len(due) <= 1, f"{due} at the same time"
        if not due:
            return num_moves
        workers.update(due)
        num_moves += 1
        assert num_moves <= len(jobs), "they go round in circles"


def test_free_rollout_goes_where_they_are_fewest_for_the_need() -> None:
    jobs = [job("old", num_prompts=8), job("young", num_prompts=2)]
    assert choose_job(jobs, [], "w").job_id == "old"
    assert choose_job(jobs, [worker("a", "old")], "w").job_id == "young"
    both = [worker("a", "old"), worker("b", "young")]
    assert choose_job(jobs, both, "w").job_id == "old"  # one for 8 prompts is less than one for 2
    assert choose_job(jobs, [*both, worker("c", "old"), worker("d", "old")], "w").job_id == "old"
    assert choose_job(jobs, [worker("a", "old", "draining")], "w").job_id == "old"  # it is on its way out


@given(st.integers(1, 5), st.integers(1, 20))
def test_rollouts_that_look_at_the_same_moment_spread_evenly(num_jobs: int, num_workers: int) -> None:
    jobs = [job(f"job-{i}") for i in range(num_jobs)]
    workers = [worker(f"w{i:02d}") for i in range(num_workers)]
    chosen = [choose_job(jobs, workers, worker.id).job_id for worker in workers]
    counts = [chosen.count(job.job_id) for job in jobs]
    assert max(counts) - min(counts) <= 1


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_moves_end_with_no_job_alone_and_another_crowded(data: st.DataObject, num_jobs: int, num_workers: int) -> None:
    jobs = [job(f"job-{i}", data.draw(st.integers(1, 9)), data.draw(st.booleans())) for i in range(num_jobs)]
    workers: dict[str, str | None] = {f"w{i}": data.draw(st.sampled_from(jobs)).job_id for i in range(num_workers)}
    settle(jobs, workers)
    counts = {job.job_id: list(workers.values()).count(job.job_id) for job in jobs}
    if any(counts[job.job_id] == 0 for job in jobs if not job.is_paused):
        assert all(counts[job.job_id] <= (0 if job.is_paused else 1) for job in jobs)


def test_no_rollout_moves_during_another_move_or_to_even_out() -> None:
    jobs = [job("a"), job("b")]
    crowd = [worker("w0", "a"), worker("w1", "a"), worker("w2", "a")]
    assert find_move(jobs, crowd, "w0") == jobs[1]
    assert find_move(jobs, crowd, "w1") is None
    assert find_move(jobs, [*crowd, worker("w3")], "w0") is None  # w3 is about to choose
    assert find_move(jobs, [*crowd[1:], worker("w0", "a", "draining")], "w1") is None
    assert find_move(jobs, [*crowd, worker("w3", "b")], "w0") is None  # 3 and 1: a move is dear
    assert find_move([jobs[0], job("b", is_paused=True)], crowd, "w0") is None  # nothing to do there


def test_last_rollout_of_a_paused_job_may_go() -> None:
    jobs = [job("a", is_paused=True), job("b")]
    assert find_move(jobs, [worker("w0", "a")], "w0") == jobs[1]


def test_rollout_that_can_serve_no_job_is_not_waited_for() -> None:
    jobs, unsuited = [job("a"), job("b")], worker("w9", state="unsuited")
    assert find_move(jobs, [worker("w0", "a"), worker("w1", "a"), unsuited], "w0") == jobs[1]
    assert choose_job(jobs, [worker("a0", state="unsuited"), worker("w1")], "w1") == jobs[0]


def test_job_that_the_first_rollout_cannot_serve_gets_another() -> None:
    jobs, old = [job("new"), job("a")], worker("w0").model_copy(update={"unsuited_for": ["new"]})
    assert choose_job(jobs[1:], [old, worker("w1")], "w0") == jobs[1]
    assert choose_job(jobs, [old, worker("w1")], "w1") == jobs[0]
    both = [old.model_copy(update={"job_id": "a"}), worker("w1", "a")]
    assert find_move(jobs[1:], both, "w0") is None
    assert find_move(jobs, both, "w1") == jobs[0]


def test_rollout_that_waits_for_its_paused_job_holds_up_no_other() -> None:
    jobs, old = [job("a", is_paused=True), job("b"), job("new")], worker("w0")
    served = [worker("w1", "b"), worker("w2", "b")]
    assert find_move(jobs, [old, *served], "w1") is None  # w0 will serve it
    assert find_move(jobs, [old.model_copy(update={"unsuited_for": ["new"]}), *served], "w1") == jobs[2]


def test_a_rollout_that_can_serve_the_other_job_moves() -> None:
    jobs = [job("a"), job("b", dtype="bfloat16")]
    old, new = (
        worker(f"w{i}", "a").model_copy(update={"bfloat16": kind}) for i, kind in enumerate(("missing", "native"))
    )
    assert find_move(jobs[:1], [old, new], "w0") is None  # it leaves job b alone
    assert find_move(jobs, [old, new], "w1") == jobs[1]
    assert find_move(jobs, [old, old.model_copy(update={"id": "w2"})], "w2") is None
