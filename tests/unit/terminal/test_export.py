"""`onbeat export`: a folder that is whole or not there, with a card, from a checkpoint on this disk."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from onbeat.config import JobConfig
from onbeat.contracts.errors import OnbeatError
from onbeat.local import export as exporting
from tests.broker_thread import BrokerThread
from tests.small_tokenizers import byte_level
from tests.stand_in_hub import running_hub
from tests.unit.terminal.conftest import Command
from tests.world import job_body

pytestmark = pytest.mark.slow

CARD = """---
language: en
license: apache-2.0
---
# Base
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model with a tokenizer, a card and a licence."""
    folder = tmp_path_factory.mktemp("models") / "tiny-base"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes, max_position_embeddings=512)).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "LICENSE").write_text("Apache License", encoding="utf-8")
    return folder


def write_checkpoint(data_dir: Path, job_id: str, base: Path, number: int, rank: int = 2) -> Path:
    """Write a checkpoint of a job with an adapter on each projection of the attention; rank 0: without adapters."""
    folder = data_dir / "jobs" / job_id / "checkpoints" / f"iteration-{number:06d}"
    shutil.copytree(base, folder)
    for name in ("README.md", "LICENSE"):
        (folder / name).unlink()
    (folder / "optimizer").mkdir()
    weights = load_file(base / "model.safetensors")
    masters: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(number)
    for name in ("q_proj", "v_proj") if rank else ():
        layer = f"model.layers.0.self_attn.{name}"
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, 16), (16, rank)))
        masters |= {f"master.{layer}.lora_A.default.weight": a, f"master.{layer}.lora_B.default.weight": b}
        weights[f"{layer}.weight"] += 2.0 * b @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    offsets = json.dumps({name: {"saved_offsets": [0, 0]} for name in masters})
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": offsets}
    save_file(masters, folder / "optimizer/rank-00000-of-00001.safetensors", metadata=metadata)
    lora = {"lora": {"rank": rank, "alpha": 2.0 * rank, "target_modules": ["q_proj", "v_proj"]}} if rank else {}
    body = job_body(name="adder", model={"path": str(base), "dtype": "float32"}, **lora)
    config = JobConfig.model_validate(body).model_dump(mode="json")
    (folder / "onbeat_job.json").write_text(json.dumps({"id": job_id, "config": config}), encoding="utf-8")
    (folder / "state.json").write_text(json.dumps({"state": {"policy_version": number}}), encoding="utf-8")
    return folder


@pytest.fixture
def job_id(broker: BrokerThread, base: Path) -> str:
    return broker.create_job(model={"path": str(base)})


@pytest.fixture
def job(trained: str, broker: BrokerThread, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a job that has succeeded and whose checkpoints after 2 and 3 iterations are in this folder's `.onbeat`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONBEAT_URL", broker.url)
    monkeypatch.delenv("ONBEAT_DATA_DIR", raising=False)
    for number in (2, 3):
        write_checkpoint(tmp_path / ".onbeat", trained, base, number)
    return trained


def test_merged_export_is_the_checkpoint_with_a_card(onbeat: Command, job: str, base: Path, tmp_path: Path) -> None:
    printed = onbeat("export", job).out
    folder = tmp_path / f"{job}-iteration-000003"
    assert printed.startswith(f"{folder.name} is written: its README.md is the model card")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"README.md", "LICENSE", "config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {"optimizer", "policies", "state.json", "onbeat_job.json"}
    checkpoint = tmp_path / f".onbeat/jobs/{job}/checkpoints/iteration-000003"
    for name in names - {"README.md", "LICENSE"}:
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    card = (folder / "README.md").read_text("utf-8")
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert card.count("\n---\n") == 1
    for sentence in (
        f"Job `{job}`",
        "jsonl: prompts.jsonl",
        "| iteration | reward in training |",
        "bits that were trained, in float32",
        "is the newest link of the audit log",
    ):
        assert sentence in card
    assert str(tmp_path) not in card


def test_adapter_export_is_a_folder_that_peft_loads(onbeat: Command, job: str, base: Path, tmp_path: Path) -> None:
    onbeat("export", job, "--adapter", "--checkpoint", "2", "--to", "given away")
    folder = tmp_path / "given away"
    names = {path.name for path in folder.iterdir()}
    files = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == files | {"README.md", "LICENSE"}
    stored = load_file(folder / "adapter_model.safetensors")
    layer = "model.layers.0.self_attn.q_proj"
    a, b = (stored[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    merged = load_file(tmp_path / f".onbeat/jobs/{job}/checkpoints/iteration-000002/model.safetensors")
    weight = load_file(base / "model.safetensors")[f"{layer}.weight"]
    torch.testing.assert_close(weight + 2.0 * b @ a, merged[f"{layer}.weight"])
    card = (folder / "README.md").read_text("utf-8")
    assert "A LoRA adapter in PEFT's format for tiny-base, in float32." in card
    assert "tokens of the job's own responses, with their prompts" in card


def test_push_leaves_no_folder_unless_it_is_named(
    onbeat: Command, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "--push needs a token of the hub that may write" in onbeat("export", job, "--push", "org/adder", code=1).err
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        before = sorted(path.name for path in tmp_path.iterdir())
        for _ in range(2):
            assert f"{hub.url}/org/adder has the files" in onbeat("export", job, "--push", "org/adder").out
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert hub.commits == [f"Onbeat job {job} after 3 iterations"]
        assert {"README.md", "LICENSE", "config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()


PUSH = "from onbeat.cli import main; import sys; sys.exit(main())"


@pytest.mark.rare  # a process for each step, which imports the client of the hub
def test_push_that_is_killed_at_any_step_is_whole_the_next_time(
    onbeat: Command, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub has all of it or nothing, also where it has taken the commit and the answer never came."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    before, wholes = sorted(path.name for path in tmp_path.iterdir()), []
    command = [sys.executable, "-c", PUSH, "export", job, "--push", "org/adder"]
    for step in itertools.count():
        with running_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            hub.hold_at = step
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as pusher:
                while not hub.is_held.wait(0.05) and pusher.poll() is None:
                    pass
                is_killed = pusher.poll() is None
                pusher.send_signal(signal.SIGKILL)
                pusher.communicate()
            hub.is_released.set()
            wholes.append(hub.files.copy())
            if not is_killed:
                assert pusher.returncode == 0
                break
            assert sorted(path.name for path in tmp_path.iterdir()) != before  # the killed one could not clear away
            hub.hold_at = None
            onbeat("export", job, "--push", "org/adder")
            assert sorted(path.name for path in tmp_path.iterdir()) == before
            assert len(hub.commits) == 1
            wholes.append(hub.files.copy())
    assert step >= 6
    assert {"README.md", "LICENSE", "config.json", "model.safetensors", "tokenizer.json"} <= wholes[-1].keys()
    assert all(files in ({}, wholes[-1]) for files in wholes)
    assert {} in wholes


def test_refusals_are_one_sentence(onbeat: Command, job: str, base: Path, tmp_path: Path) -> None:
    there = f"job {job} has no checkpoint after 1 iterations any more, or never had; there are those after 2, 3 in"
    assert there in onbeat("export", job, "--checkpoint", "1", code=1).err
    assert "ask for two exports" in onbeat("export", job, "--adapter", "--merged", code=2).err
    (tmp_path / "taken").mkdir()
    assert "taken exists already; give another folder" in onbeat("export", job, "--to", "taken", code=1).err
    elsewhere = onbeat("export", job, "--url", os.environ["ONBEAT_URL"], "--data-dir", str(tmp_path / "no"), code=1).err
    assert f"no checkpoint of job {job} is in {tmp_path / 'no'}: " in elsewhere
    assert "export where that folder is" in elsewhere
    for number in (2, 3):
        shutil.rmtree(tmp_path / f".onbeat/jobs/{job}/checkpoints/iteration-{number:06d}")
    write_checkpoint(tmp_path / ".onbeat", job, base, 3, rank=0)
    assert "trained all parameters, so it has no adapter" in onbeat("export", job, "--adapter", code=1).err
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("partial")] == []


def test_checkpoint_that_is_dropped_meanwhile_is_refused(
    onbeat: Command, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def copy_and_drop(source: Path, target: Path) -> object:
        source.with_name("state.json").unlink(missing_ok=True)
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_and_drop)
    assert "the trainer dropped" in onbeat("export", job, "--to", "out", code=1).err
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


KILLED = """
import sys, time
from pathlib import Path
from onbeat.local.export import whole_folder
with whole_folder(Path(sys.argv[1])) as draft:
    (draft / "model.safetensors").write_bytes(b"half")
    print("half", flush=True)
    time.sleep(60)
"""


def test_killed_export_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        with pytest.raises(OnbeatError, match="another export is writing"), exporting.whole_folder(target):
            pass
        writer.send_signal(signal.SIGKILL)
    assert not target.exists()
    with exporting.whole_folder(target) as draft:
        assert list(draft.iterdir()) == []  # the leftover is gone
        (draft / "config.json").write_text("{}", encoding="utf-8")
        assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in target.iterdir()] == ["config.json"]


KILLED_AT_A_STEP = """
import os, shutil, signal, sys
from pathlib import Path
from onbeat.cli import main
left = int(sys.argv.pop(1))
def killing(function):
    def step(*arguments, **options):
        global left
        left -= 1
        if left == -1:
            if function is copy:
                Path(arguments[1]).write_bytes(Path(arguments[0]).read_bytes()[:9])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return step
copy = shutil.copyfile
for owner, name in ((shutil, "copyfile"), (os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "mkdir")):
    setattr(owner, name, killing(getattr(owner, name)))
sys.exit(main())
"""


@pytest.mark.rare  # a process for each step
def test_export_that_is_killed_at_any_step_is_whole_or_not_there(onbeat: Command, job: str, tmp_path: Path) -> None:
    """Steps are copies, of which the last is half done, texts, syncs to the disk, and the change of the name."""
    onbeat("export", job, "--to", "expected")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    target, num_whole = tmp_path / "out", 0
    for step in itertools.count():
        command = [sys.executable, "-c", KILLED_AT_A_STEP, str(step), "export", job, "--to", "out"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        if target.exists():
            num_whole += 1
            assert {path.name: path.read_bytes() for path in target.iterdir()} == expected
            shutil.rmtree(target)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert step > 2 * len(expected)
    assert num_whole == 2  # killed behind the change of the name, and not killed
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
