import pytest

from w4a4.calibrate.shape_source import ShapeSource, open_shape
from w4a4.configs.errors import NotFoundError
from w4a4.configs.recipe import load_recipe
from w4a4.export.estimate import estimate


def test_an_alias_that_is_not_here_has_its_shape_and_nothing_else() -> None:
    source = open_shape("llama3-70b", offline=True)
    assert isinstance(source, ShapeSource)
    assert (source.config.num_layers, source.config.hidden_size) == (80, 8192)
    assert "model.layers.79.mlp.down_proj.weight" in source.names()
    with pytest.raises(NotFoundError, match="not in the cache"):
        source.tensor("model.norm.weight")
    with pytest.raises(NotFoundError, match="not in the cache"):
        source.tokenizer()


def test_a_70b_model_is_costed_without_its_files() -> None:
    """36 minutes and 34 GiB were measured on an H200, whose float32 rate is near 25 T MACs a second."""
    source = open_shape("llama3-70b", offline=True)
    needs = estimate(source.config, load_recipe("dual"), 32, 2048, 2.5e13, "cuda")
    assert 25 < needs.seconds / 60 < 45
    assert 30 < needs.device_memory / 2**30 < 37


def test_a_name_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        open_shape("no/such-model", offline=True)
