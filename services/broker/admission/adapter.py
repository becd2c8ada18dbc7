"""The check of the adapter that a job starts from, by its configuration and the headers of safetensors files.

The trainer, which knows the layers of the model, checks all of its tensors again when the job starts. Names in files
may differ from those of layers, so a layer that no file names is left to it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onbeat.config import JobConfig
from onbeat.config.adapter import CONFIG_FILE, NOT_READ, WEIGHTS_FILE, layer_of, problems_of_config
from onbeat.contracts.model_config import text_config
from services.broker.admission.model_files import Complaint, Shape, read_header, read_json
from services.broker.admission.models import folder_of

NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def review_adapter_to_train(config: JobConfig, has_model_folders: bool) -> list[Complaint]:
    """Return the first thing that is wrong with the job's adapter. `has_model_folders`: the trainers' folders can be
    seen from here."""
    if config.model.adapter is None or config.lora is None or not has_model_folders:
        return []
    folder = Path(config.model.adapter).expanduser()
    try:
        written, header = read_json(folder / CONFIG_FILE), read_header(folder / WEIGHTS_FILE)
        problem = f"{WEIGHTS_FILE} is not whole: {header.problem}" if header.problem else ""
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        return [("model.adapter", f"{folder} cannot be read ({problem}); {NOT_READ}")]
    problems = [*problems_of_config(written, config.model.path, config.lora)]
    if not problems and (base := folder_of(config.model.path)) is not None:
        problems = [*problems_of_layers(header.shapes, base)]
    return [("model.adapter", f"{folder} {problem}") for problem in problems[:1]]


def problems_of_layers(adapter: Mapping[str, Shape], base: Path) -> Iterator[str]:
    """Yield which layers of the adapter show that it is of another model than the one in the folder `base`."""
    num_layers, weights = num_layers_in(base), shapes_in(base)
    for name, a in sorted(adapter.items()):
        layer, factor = layer_of(name), name.removesuffix(".lora_A.weight")
        b = adapter.get(f"{factor}.lora_B.weight")
        numbers = [int(part) for part in layer.split(".") if part.isdigit()]
        if num_layers is not None and numbers and numbers[0] >= num_layers:
            yield f"is an adapter of another model: it adapts {layer}, and {base} has {num_layers} layers"
        if b is None or len(a) != 2 or len(b) != 2 or not numbers:
            continue
        size = b[0], a[1]
        there = weights.get(tail_of(layer), [])
        if there and all(sorted(shape) != sorted(size) for shape in there):  # some families keep theirs transposed
            shapes = f"a weight of the shape {size}, and {base} has {' or '.join(map(str, there))}"
            yield f"is an adapter of another model: it adapts {layer} as {shapes}"


def num_layers_in(folder: Path) -> int | None:
    """Return the number of the model's decoder layers; None if its configuration does not name it."""
    try:
        model: Any = read_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return None
    numbers = [text_config(model).get(name) for name in NUM_LAYERS] if isinstance(model, dict) else []
    return next((number for number in numbers if isinstance(number, int)), None)


def shapes_in(folder: Path) -> dict[str, list[Shape]]:
    """Return the shapes of a model's matrices in layers by the ends of their names: parts of a model, such as one for
    pictures, may have the same."""
    shapes: dict[str, list[Shape]] = {}
    for file in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        for name, shape in read_header(file).shapes.items():
            if name.endswith(".weight") and len(shape) == 2 and shape not in shapes.get(tail_of(name), []):
                shapes.setdefault(tail_of(name.removesuffix(".weight")), []).append(shape)
    return shapes


def tail_of(name: str) -> str:
    """Return a name from its first number on, because what is before it differs between files and programs.

    >>> tail_of("model.layers.3.self_attn.q_proj")
    '3.self_attn.q_proj'
    """
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[first:])
