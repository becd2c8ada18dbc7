"""A broker that only pretends: the REST contract, with jobs that commit an iteration every `STEP_S` seconds.

Runs inside a test (`serve`) or as a process of its own in place of `services.broker` (`python fake_broker.py`).
"""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse

from onbeat.types import MAX_LISTED_ITERATIONS, MAX_LISTED_JOBS

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.05"))


def problem(status: int, title: str, detail: str = "", errors: list[dict[str, str]] | None = None) -> JSONResponse:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "errors": errors or []}
    return JSONResponse(body, status, media_type="application/problem+json")


class FakeJobs:
    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []  # status codes to answer before doing the work
        self.delay_s = 0.0  # before an answer
        self.authorization: str | None = None
        self.audit: dict[str, Any] = {}  # over a clean report
        self.findings: list[dict[str, Any]] = []  # of the doctor
        self.workers: list[dict[str, Any]] = [{"id": "rollout-0", "state": "generating", "num_in_flight": 3}]
        self.begins_with_watch = False  # jobs wait until somebody asks what they wait for
        self.refuses_samples = 0  # a status code, for questions for samples
        self.is_stopping = False
        self.uploads: dict[str, bytes] = {}
        self.num_at_once = MAX_LISTED_ITERATIONS  # iterations or versions in one answer

    def create(self, config: dict[str, Any], key: str) -> dict[str, Any]:
        if key not in self.by_key:
            job_id = f"job-{len(self.jobs) + 1}"
            self.by_key[key] = job_id
            self.jobs[job_id] = {"config": config, "created_at": time.time(), "ended": None}
        return self.record(self.by_key[key])

    def record(self, job_id: str) -> dict[str, Any]:
        job = self.jobs[job_id]
        num_iterations = job["config"]["schedule"]["num_iterations"]
        done = self.num_committed(job_id)
        state = job["ended"] or ("SUCCEEDED" if done == num_iterations else "RUNNING")
        return {
            "id": job_id,
            "name": job["config"]["name"],
            "pool": "default",
            "state": state,
            "created_at": job["created_at"],
            "started_at": job["created_at"],
            "finished_at": time.time() if state != "RUNNING" else None,
            "num_iterations": num_iterations,
            "next_iteration": done,
            "checkpoint": "/somewhere/checkpoint",
            "config": job["config"],
            "error": "the model does not load" if state == "FAILED" else None,
        }

    def num_committed(self, job_id: str) -> int:
        job = self.jobs[job_id]
        begun_at = job.get("watched_at", time.time()) if self.begins_with_watch else job["created_at"]
        steps = int((time.time() - begun_at) / STEP_S)
        return min(steps, job["config"]["schedule"]["num_iterations"])

    def iterations(self, job_id: str) -> list[dict[str, Any]]:
        opened = self.num_committed(job_id) + (self.record(job_id)["state"] == "RUNNING")
        return [iteration_json(i, i < self.num_committed(job_id)) for i in range(opened)]

    def diagnosis(self) -> dict[str, Any]:
        is_healthy = not any(finding.get("is_problem") for finding in self.findings)
        return {"is_healthy": is_healthy, "findings": self.findings}

    async def stream(self, job_id: str, after: str) -> AsyncIterator[str]:
        """All that is so, whenever it has changed: the job, its iterations, its one event, what the doctor says."""
        sent: dict[str, str] = {}
        while job_id in self.jobs:
            record = self.record(job_id)
            states = {"job": record, "explain": self.diagnosis()}
            states |= {f"iteration {one['iteration']}": {"record": one} for one in self.iterations(job_id)}
            for name, state in states.items():
                if sent.get(name) != (text := json.dumps(state)):
                    sent[name] = text
                    yield f"event: {name.split()[0]}\ndata: {text}\n\n"
            if after == "0":
                after = EVENT["id"]
                yield f"event: event\ndata: {json.dumps(EVENT)}\nid: {after}\n\n"
            if self.is_stopping or record["state"] not in ("RUNNING", "PENDING"):
                break
            await asyncio.sleep(0.01)
        reason = "stopping" if self.is_stopping else "over"
        yield f'event: end\ndata: {{"reason": "{reason}"}}\n\n'

    def evaluations(self, job_id: str) -> list[dict[str, Any]]:
        """Before the first iteration, and at the end."""
        num_iterations = self.jobs[job_id]["config"]["schedule"]["num_iterations"]
        if not self.jobs[job_id]["config"].get("evaluation"):
            return []
        done = self.num_committed(job_id) == num_iterations
        return [evaluation_json(0), evaluation_json(num_iterations, "DONE" if done else "OPEN")]


EVENT = {"id": "1-0", "time": 1.0, "kind": "job.state", "message": "RUNNING", "data": {"state": "RUNNING"}}


def evaluation_json(evaluation: int, state: str = "DONE") -> dict[str, Any]:
    record: dict[str, Any] = {"evaluation": evaluation, "state": state, "policy_version": evaluation, "num_groups": 4}
    if state == "DONE":
        record |= {
            "reward_mean": evaluation / 10,
            "pass_at_k": 0.5,
            "response_tokens_mean": 7.0,
            "truncated_frac": 0.25,
        }
    return record


def weights_json(version: int, open_s: float | None = None) -> dict[str, Any]:
    """1000 bytes, of which two rollouts get 10 as a delta. The first version they get in full."""
    update = {"received_bytes": 10 if version else 1000, "sources": ["h:1"], "pull_s": 0.2, "apply_s": 0.1}
    update |= {"load_s": 0.3, "open_s": open_s, "held_s": None, "num_faults": 0}
    published = {"full_bytes": 1000, "delta_bytes": 10 if version else None, "encode_s": 0.05, "publish_s": 0.4}
    return {"policy_version": version, **published, "rollouts": {"rollout-0": update, "rollout-1": update}}


def iteration_json(iteration: int, is_committed: bool = True) -> dict[str, Any]:
    record: dict[str, Any] = {
        "iteration": iteration,
        "state": "COMMITTED" if is_committed else "OPEN",
        "policy_version": iteration,
        "num_groups": 2,
        "num_accepted": 2 if is_committed else 1,
        "opened_at": 100.0 + 2 * iteration,
    }
    if is_committed:
        record |= {"num_responses": 8, "prompt_tokens": 40, "response_tokens": 60, "reward_mean": iteration / 10}
        record |= {"wall_s": 2.0, "tpspd": 25.0, "num_stale": 1, "committed_at": 102.0 + 2 * iteration}
    return record


def make_app(fake: FakeJobs) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def watch(request: Request, call_next: Any) -> Any:
        fake.requests.append((request.method, request.url.path))
        fake.authorization = request.headers.get("authorization")
        await asyncio.sleep(fake.delay_s)
        if fake.failures:
            return problem(fake.failures.pop(0), "not now")
        return await call_next(request)

    @app.exception_handler(KeyError)
    async def refuse_unknown_job(_: Request, error: KeyError) -> Any:
        return problem(404, "Job not found", f"there is no job {error}")

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/v1/datasets")
    async def datasets() -> Any:
        return {"datasets": [], "max_bytes": 1 << 20}

    @app.put("/v1/datasets/{name}", status_code=201)
    async def upload(name: str, request: Request) -> Any:
        body = fake.uploads[name] = await request.body()
        return {"name": name, "path": f"datasets/{name}", "num_bytes": len(body), "uploaded_at": time.time()}

    @app.post("/v1/jobs", status_code=201)
    async def create(request: Request) -> Any:
        config = await request.json()
        if config.get("model", {}).get("path") == "no-such-model":
            error = {"field": "model.path", "message": "unknown model; try bundled:smollm2-135m-instruct"}
            return problem(422, "Invalid job", "the job was not created", [error])
        return fake.create(config, request.headers["idempotency-key"])

    @app.post("/v1/jobs:validate")
    async def validate(request: Request) -> Any:
        if (await request.json())["model"]["path"] == "no-such-model":
            return problem(422, "Job refused", "", [{"field": "model.path", "message": "unknown model"}])
        return {"notes": ["2 of 9 prompts are left out"]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        said = (await request.json())["messages"]
        if said[-1]["content"] == "too long":
            return JSONResponse({"error": {"message": "max_tokens: lower it", "code": "invalid_value"}}, 400)
        return {"choices": [{"message": {"content": f"{len(said)}: {said[-1]['content']}\x1b[2J"}}]}

    @app.get("/v1/jobs")
    async def list_jobs(state: str | None = None, limit: Annotated[int, Query(le=MAX_LISTED_JOBS)] = 200) -> Any:
        records = [fake.record(job_id) for job_id in reversed(fake.jobs)]
        return {"jobs": [record for record in records if state in (None, record["state"])][:limit]}

    @app.delete("/v1/jobs/{job_id}", status_code=204)
    async def delete(job_id: str) -> None:
        del fake.jobs[job_id]

    @app.post("/v1/jobs/{job_id}:{verb}")
    async def move(job_id: str, verb: str) -> Any:
        fake.jobs[job_id]["ended"] = {"cancel": "CANCELLED", "pause": "PAUSED", "resume": None}[verb]
        return fake.record(job_id)

    @app.get("/v1/jobs/{job_id}:explain")
    async def explain(job_id: str) -> Any:
        fake.jobs[job_id].setdefault("watched_at", time.time())
        return fake.diagnosis()

    @app.get("/v1/jobs/{job_id}")
    async def get(job_id: str) -> Any:
        return fake.record(job_id)

    @app.get("/v1/jobs/{job_id}/iterations")
    async def iterations(job_id: str, after: int = -1) -> Any:
        records = [record for record in fake.iterations(job_id) if record["iteration"] > after]
        return {"iterations": records[: fake.num_at_once]}

    @app.get("/v1/jobs/{job_id}/evaluations")
    async def evaluations(job_id: str, after: int = -1) -> Any:
        return {"evaluations": [record for record in fake.evaluations(job_id) if record["evaluation"] > after]}

    @app.get("/v1/jobs/{job_id}/evaluations/{evaluation}/samples")
    async def evaluation_samples(job_id: str, evaluation: int) -> Any:
        return await samples(job_id, evaluation, 1)

    @app.get("/v1/jobs/{job_id}/audit")
    async def audit(job_id: str) -> Any:
        counts = {"num_entries": 9, "num_groups": 4, "num_commits": 2, "num_contents": 4, "num_contents_gone": 0}
        return {"is_clean": True, "violation": None, "head": "ab12", **counts} | fake.audit

    @app.get("/v1/jobs/{job_id}/weights")
    async def weights(job_id: str, after: int = -1) -> Any:
        versions = range(fake.num_committed(job_id) + 1)
        records = [weights_json(v, v / 10 if v else None) for v in versions if v > after]
        return {"weights": records[: fake.num_at_once]}

    @app.get("/v1/jobs/{job_id}/metrics")
    async def metrics(job_id: str, after: int = -1) -> Any:
        numbers = range(after + 1, fake.num_committed(job_id))[: fake.num_at_once]
        series = {"iteration/reward_mean": [[i, i / 10] for i in numbers]}
        series |= {"iteration/reward_std": [[i, 0.25] for i in numbers]}
        series |= {"train/loss": [[i, 1.5 - i / 4] for i in (0, 1) if i > after]}
        scored = [record["evaluation"] for record in fake.evaluations(job_id)]
        series |= {"eval/reward_mean": [[e, 0.5] for e in scored if e > after]} if scored else {}
        return {"metrics": series}

    @app.get("/v1/jobs/{job_id}/samples")
    async def samples(job_id: str, iteration: int | None = None, limit: int = 10) -> Any:
        if fake.refuses_samples:
            return problem(fake.refuses_samples, "no samples")
        sample = {"policy_version": 0, "prompt": "What is [1] + 1?", "reward": 1, "num_tokens": 4}
        sample |= {"iteration": iteration or 0, "response": "[bold]\x1b[2J2", "finish_reason": "stop"}
        return {"samples": [sample | {"group_id": f"g{i // 4}"} for i in range(8)][:limit]}

    @app.get("/v1/jobs/{job_id}/events")
    async def events(job_id: str, after: str = "0") -> Any:
        return {"events": [EVENT] if after == "0" else []}

    @app.get("/v1/jobs/{job_id}/stream")
    async def stream(job_id: str, request: Request, after: str = "0") -> Any:
        if job_id not in fake.jobs:
            return problem(404, "Job not found", f"there is no job {job_id!r}")
        after = request.headers.get("last-event-id", after)
        return StreamingResponse(fake.stream(job_id, after), media_type="text/event-stream")

    @app.get("/v1/doctor")
    async def doctor() -> Any:
        return fake.diagnosis()

    @app.get("/v1/pools/{pool}")
    async def pool(pool: str) -> Any:
        return {"pool": pool, "num_jobs": 1, "num_prompts": 5, "num_trainers": 1, "num_rollouts": len(fake.workers)}

    @app.get("/v1/workers")
    async def workers() -> Any:
        return {"workers": [{"last_seen_at": time.time()} | worker for worker in fake.workers]}

    return app


@contextlib.contextmanager
def serve(fake: FakeJobs, port: int = 0) -> Iterator[str]:
    """The URL of a real HTTP server in a thread."""
    fake.is_stopping = False
    server = uvicorn.Server(uvicorn.Config(make_app(fake), port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        fake.is_stopping = server.should_exit = True
        thread.join()


if __name__ == "__main__":
    uvicorn.run(make_app(FakeJobs()), host=os.environ["ONBEAT_HOST"], port=int(os.environ["ONBEAT_PORT"]))
