"""Models of many kinds, in folders as jobs name them: trained right, in the expected way, or refused by name."""

import pytest

from tests.architectures import VARIANTS, Row, measure

pytestmark = pytest.mark.slow

OPTIONS = {f"{model_type}, {variant}": (model_type, options) for model_type, variant, options in VARIANTS}
EXPECTED = {
    "llama": "packed",
    "afmoe": "packed",  # views the output of its attention
    "apertus": "packed",
    "cohere2": "packed",
    "bart": "not packed",
    "bloom": "not packed",
    "gemma2": "not packed",
    "cohere2, long sequences": "not packed",
    "deepseek_v4": "refused",
    "gemma4": "packed",  # a model with pictures, whose tokens no text has
    "qwen3_moe": "packed",  # experts
    "falcon, ALiBi": "not packed",  # chooses its attention when it is built
    "falcon_h1, head with a multiplier": "not packed",  # the logits are more than a product
    "gpt_oss": "not packed",  # sinks and a window
    "inkling_text": "not packed",  # a configuration without tie_word_embeddings
    "recurrent_gemma": "not packed",  # a state in place of attention
    "qwen3_next": "not packed",  # states whose norm multiplies rounding when they remember too little
    "doge, long sequences": "refused",  # attends to other tokens when it is padded
    "minimax": "refused",  # twelve random layers amplify rounding to 1 % of the logits in float32
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_trainer_is_right_about(name):
    model_type, options = OPTIONS.get(name, (name.removesuffix(", long sequences"), {}))
    result = measure(Row(name, model_type, name.endswith("long sequences"), options))
    assert result["outcome"] == EXPECTED[name], result
