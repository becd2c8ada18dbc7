"""Checkpoints: written behind training's back, durable before they count, refused by name when they are not whole."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from onbeat.contracts.errors import JobFailed
from services.trainer.checkpoints import store as checkpoint
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.model.lora import published_sizes, published_tensors
from services.trainer.model.model import frozen_base, load_frozen
from services.trainer.passes.shrink import random_model, shrunken
from services.trainer.weights.store import take_snapshot
from tests.trainer_fixtures import tiny_config, tiny_model

pytestmark = pytest.mark.slow

STATE = TrainState("job", next_iteration=3, policy_version=3, published_version=2, num_steps=2, model_path="tiny")


def tensors(value=1.0):
    return {"master.w": torch.full((2, 3), value), "exp_avg.w": torch.full((2, 3), -value), "gac.b": torch.ones(1)}


def store_with(folder, *iterations, keep=2):
    store = CheckpointStore(folder, keep)
    for iteration in iterations:
        state = replace(STATE, next_iteration=iteration)
        store.save(state, [("w", torch.ones(2, 3))], tensors(iteration), {"config.json": b"{}"})
    store.wait()
    return store


def save(store, weights=(), value=1.0, files=None, policies=None):
    """Save iteration 3, and wait until it is there."""
    store.save(STATE, weights, tensors(value), files or {}, policies)
    store.wait()
    return store


def restore(store, **options):
    """Return (state, tensors), or None."""
    loaded = {}
    state = store.restore(
        "job", "tiny", lambda tensors, num_steps: loaded.update(tensors, num_steps=num_steps), **options
    )
    return state and (state, loaded)


@pytest.fixture
def gate(monkeypatch):
    """Writers wait before they write the exported weights until the gate is set."""
    gate, save_file = threading.Event(), checkpoint.save_file

    def wait_and_save(*arguments, **options):
        assert gate.wait(10)
        save_file(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_file", wait_and_save)
    yield gate
    gate.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, gate):
    signs: list[str] = []
    store = CheckpointStore(tmp_path, keep=2, while_waiting=lambda: signs.append("waiting"))
    live = {"w": torch.ones(2, 3)}  # the exported weights, which may be the parameters themselves
    store.save(STATE, live.items(), tensors(1.0), {})
    assert (store.finished(), store.complete()) == ([], [])
    store.timeout_s = 0.05
    with pytest.raises(JobFailed, match=r"iteration-000003 is still not on disk .*ONBEAT_CHECKPOINT_TIMEOUT_S"):
        store.wait()
    store.timeout_s = 60.0
    assert signs  # a watchdog need not take this for a stuck step
    stepping = threading.Thread(target=lambda: (store.wait_until_read(), live["w"].fill_(99.0)))
    stepping.start()
    stepping.join(0.1)
    assert stepping.is_alive(), "the next step must wait until its tensors are read"
    gate.set()
    stepping.join(10)
    store.wait()
    assert store.finished() == [(3, tmp_path / "iteration-000003")]
    assert store.finished() == []
    assert torch.equal(load_file(store.path(3) / "model.safetensors")["w"], torch.ones(2, 3))
    state, loaded = restore(store)
    assert (state, loaded["num_steps"]) == (STATE, 2)
    assert loaded.keys() == {*tensors(), "num_steps"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(1.0).items())


def test_one_save_at_a_time_and_none_is_forgotten(tmp_path, gate):
    store, weights = CheckpointStore(tmp_path, keep=2), [("w", torch.ones(2, 3))]
    store.save(STATE, weights, tensors(), {})
    second = threading.Thread(target=store.save, args=(replace(STATE, next_iteration=4), weights, tensors(), {}))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "the second save must wait for the first"
    gate.set()
    second.join(10)
    store.wait()
    assert [next_iteration for next_iteration, _ in store.finished()] == [3, 4]


@pytest.mark.parametrize("notice", ["wait", "finished", "save"])
def test_a_failed_write_reaches_training_with_its_cause(tmp_path, notice):
    store = store_with(tmp_path / "checkpoints", 1)
    store.finished()
    (tmp_path / "checkpoints" / ".iteration-000003.0.partial").write_text("a file in the way")
    store.save(STATE, [], tensors(), {})
    calls = {"wait": store.wait, "finished": store.finished, "save": lambda: store.save(STATE, [], tensors(), {})}
    store._in_flight[1].exception(10)  # it is over, and nobody has looked
    with pytest.raises(JobFailed, match=r"iteration-000003 cannot be written: .*File exists") as failure:
        calls[notice]()
    assert isinstance(failure.value.__cause__, OSError)
    assert restore(store)[0].next_iteration == 1


def test_the_newest_are_kept_and_a_failure_costs_none(tmp_path, monkeypatch):
    store = store_with(tmp_path, 1, 2, 3, keep=2)
    assert [folder.name for folder in store.complete()] == ["iteration-000002", "iteration-000003"]
    monkeypatch.setattr(checkpoint, "write_content", lambda *_: {"missing": 1})
    with pytest.raises(JobFailed, match="missing is missing"):
        store_with(tmp_path, 4, keep=1)
    assert [folder.name for folder in store.complete()] == ["iteration-000002", "iteration-000003"]
    assert restore(store)[0].next_iteration == 3


def test_all_is_on_disk_before_a_checkpoint_appears(tmp_path, monkeypatch):
    synced, appear = set(), checkpoint.appear

    def check_and_appear(partial, target):
        assert synced == {partial, *partial.rglob("*")}
        appear(partial, target)

    monkeypatch.setattr(checkpoint, "sync_path", synced.add)
    monkeypatch.setattr(checkpoint, "appear", check_and_appear)
    store_with(tmp_path, 3)
    assert tmp_path in synced  # the new name of the folder is on disk, too


def test_a_save_over_a_complete_one_leaves_it(tmp_path):
    """A trainer that lost its job may be late with the same bits, while its successor reads."""
    store_with(tmp_path, 3)
    late = save(CheckpointStore(tmp_path, keep=2), value=7.0)
    assert restore(late)[1]["master.w"].unique() == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000003"]


def test_a_late_trainer_leaves_what_its_successor_is_writing(tmp_path):
    for epoch in (1, 3):
        (tmp_path / f".iteration-000004.{epoch}.partial").mkdir()
    save(CheckpointStore(tmp_path, keep=2, writer="2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".iteration-000004.3.partial", "iteration-000003"]


def test_checkpoint_that_is_dropped_while_it_is_read_gives_way(tmp_path, monkeypatch):
    """A trainer that has lost the job ends a write meanwhile, and is about to remove the older one."""
    store_with(tmp_path, 2)
    read = checkpoint.read_tensors

    def read_late(folder, sharded):
        if "iteration-000003" in str(folder):
            return read(folder, sharded)
        with monkeypatch.context() as late:
            late.setattr(checkpoint.shutil, "rmtree", lambda *_, **options: None)
            store_with(tmp_path, 3, keep=1)
        raise FileNotFoundError("some of its files")

    monkeypatch.setattr(checkpoint, "read_tensors", read_late)
    state, loaded = restore(CheckpointStore(tmp_path, keep=1))
    assert state.next_iteration == 3
    assert torch.equal(loaded["master.w"], tensors(3)["master.w"])


def test_before_chooses_the_newest_one_without_the_iteration(tmp_path):
    """Newest by number: names of seven digits come first in the alphabet."""
    store = store_with(tmp_path, 2, 999_999, 1_000_000, keep=5)
    chosen = {before: restore(store, before=before)[0].next_iteration for before in (2, 3, 999_999, 2_000_000)}
    assert chosen == {2: 2, 3: 2, 999_999: 999_999, 2_000_000: 1_000_000}
    assert restore(store)[0].next_iteration == 1_000_000
    assert restore(store, before=1) is None
    assert restore(CheckpointStore(tmp_path / "nothing", keep=1)) is None


def test_the_folder_loads_as_an_ordinary_model(tmp_path):
    config = tiny_config()
    model = tiny_model(config, torch.bfloat16)
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    snapshot = take_snapshot(3, model.named_parameters())
    store = save(CheckpointStore(tmp_path, keep=1), snapshot.tensors(), files=files)
    loaded = AutoModelForCausalLM.from_pretrained(store.path(3), dtype=torch.bfloat16)
    expected = dict(model.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_buffers_of_the_state_are_exported_and_frozen(tmp_path):
    """A router's correction bias is no parameter, and decides which experts compute."""
    model = random_model(shrunken(Glm4MoeConfig(), 64), "eager")
    published = dict(published_tensors(model))
    biases = [name for name in published if name.endswith("e_score_correction_bias")]
    assert biases
    assert published.keys() == published_sizes(model).keys() == frozenset(dict(published_tensors(frozen_base(model))))
    files = {"config.json": model.config.to_json_string(use_diff=False).encode()}
    store = save(CheckpointStore(tmp_path, keep=1), take_snapshot(3, published.items()).tensors(), files=files)
    loaded = AutoModelForCausalLM.from_pretrained(store.path(3), attn_implementation="eager", dtype=torch.float32)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-4)
    with pytest.raises(AssertionError, match=f"nothing for {biases[0]}"):
        load_frozen(frozen_base(model), [(name, tensor) for name, tensor in published.items() if name != biases[0]])


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(name):
    return lambda folder: (folder / name).unlink()


def change_state(**values):
    def change(folder):
        record = json.loads((folder / "state.json").read_text())
        record["state"] |= values
        (folder / "state.json").write_text(json.dumps(record))

    return change


SHARD = "optimizer/rank-00000-of-00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("model.safetensors", 60), r"model.safetensors is torn: 60 bytes instead of \d+"),
        (cut(SHARD, 100), f"{SHARD} is torn: 100 bytes"),
        (remove(SHARD), f"{SHARD} is missing"),
        (remove("config.json"), "config.json is missing"),
        (cut("state.json", 20), "state.json is torn"),
        (change_state(job_id="other"), "it belongs to job other on tiny"),
        (change_state(model_path="llama"), "it belongs to job job on llama"),
        (change_state(color="blue"), "state.json is torn or of another version.*color"),
    ],
)
def test_what_is_torn_or_foreign_is_refused_by_name(tmp_path, damage, message):
    store = store_with(tmp_path, 3)
    damage(store.path(3))
    with pytest.raises(ValueError, match=rf"iteration-000003 cannot be used: .*{message}.*submit the job again"):
        restore(store)


def test_a_half_written_folder_does_not_count(tmp_path):
    store = store_with(tmp_path, 2)
    (tmp_path / ".iteration-000003.0.partial").mkdir()
    (tmp_path / ".iteration-000003.0.partial" / "state.json").write_text("{}")
    (tmp_path / "iteration-000004").mkdir()  # a folder without state.json
    assert restore(store)[0].next_iteration == 2
    assert restore(save(store))[0].next_iteration == 3, "and is no hindrance"
