"""The safetensors file of a version: its header is checked, and the tensors that differ from the served version are
found. No weight is read here.

The loaders of both engines load what they are given and keep the rest: a file that lacks a tensor would silently mix
two policies. So a file must hold exactly the tensors of the checkpoint that the engine was started on, by its header,
before a single weight is touched.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from onbeat.engines import BadWeightFile
from onbeat.engines.arrivals import whole_modules
from onbeat.weights.wire import Manifest

# Checkpoints of models with tied embeddings may or may not repeat the embedding under this name.
LM_HEAD_WEIGHT = "lm_head.weight"

TensorShapes = dict[str, tuple[int, ...]]


def read_shapes(weights_file: Path) -> TensorShapes:
    """Return the names and shapes in a safetensors file. Raises BadWeightFile if it is missing or broken."""
    try:
        with safe_open(weights_file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadWeightFile(f"cannot read the weights in {weights_file}: {error}") from error


def read_checkpoint_shapes(model_dir: Path) -> TensorShapes:
    """Return the names and shapes of a whole HF checkpoint, sharded or not."""
    shapes: TensorShapes = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        shapes |= read_shapes(shard)
    if not shapes:
        raise BadWeightFile(f"no safetensors file in {model_dir}")
    return shapes


def check_weight_file(weights_file: Path, expected: TensorShapes, *, is_tied: bool) -> set[str]:
    """Return the names in the file. Raises BadWeightFile unless it holds exactly the `expected` tensors.

    Dtypes may differ. A tied model's own output head, which no engine reads, may be there or not.
    """
    shapes = read_shapes(weights_file)
    ignored = {LM_HEAD_WEIGHT} if is_tied else set()
    names, expected_names = shapes.keys() - ignored, expected.keys() - ignored
    if names != expected_names:
        missing, unexpected = sorted(expected_names - names), sorted(names - expected_names)
        raise BadWeightFile(
            f"{weights_file} is of another model: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unexpected)} are unexpected {unexpected[:3]}"
        )
    for name in sorted(names):
        if shapes[name] != expected[name]:
            raise BadWeightFile(f"{name} in {weights_file} has shape {shapes[name]}, the model's is {expected[name]}")
    return set(shapes)


def names_to_load(served: Manifest | None, manifest: Manifest) -> set[str]:
    """Return the tensors that differ from the served version, by whole modules; all of them if none is served."""
    names = {tensor.name for tensor in manifest.tensors}
    if served is None:
        return names
    digests = {tensor.name: tensor.digest for tensor in served.tensors}
    return whole_modules((tensor.name for tensor in manifest.tensors if digests[tensor.name] != tensor.digest), names)
