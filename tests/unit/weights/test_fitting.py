"""Which checkpoints are of the model that is served, by the names, types and shapes of their tensors."""

from collections.abc import Mapping

import pytest

from clawstream.inference.model_folder import TensorHeader
from clawstream.weights.taking import misfit

CONFIG = {"num_hidden_layers": 2, "tie_word_embeddings": False}


def tensors(**more: tuple[str, tuple[int, ...]] | None) -> dict[str, TensorHeader]:
    """A model's tensors; `more` by the last part of its name, None: it is not there."""
    found: dict[str, tuple[str, tuple[int, ...]] | None] = {
        "model.embed_tokens.weight": ("BF16", (8, 4)),
        "model.layers.0.mlp.weight": ("BF16", (4, 4)),
        "model.layers.1.mlp.weight": ("BF16", (4, 4)),
        "lm_head.weight": ("BF16", (8, 4)),
    }
    found |= {name.replace("__", "."): header for name, header in more.items()}
    return {name: TensorHeader(dtype=header[0], shape=header[1]) for name, header in found.items() if header}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            tensors(lm_head__weight=("BF16", (9, 4))),
            "lm_head.weight: found BF16 [9, 4], expected BF16 [8, 4]",
        ),
        (
            tensors(model__layers__1__mlp__weight=None),
            "model.layers.1.mlp.weight: found nothing, expected BF16 [4, 4]",
        ),
        (
            tensors(model__layers__0__bias=("F32", (4,))),
            "model.layers.0.bias: found F32 [4], expected nothing",
        ),
        (
            tensors(model__layers__0__mlp__weight=("I8", (4, 4))),
            "model.layers.0.mlp.weight: found I8 [4, 4], expected BF16 [4, 4]",
        ),
        (tensors(lm_head__weight=None), "lm_head.weight: found nothing, expected BF16 [8, 4]"),
        (
            {},
            "lm_head.weight: found nothing, expected BF16 [8, 4]; and 3 tensors more do not fit",
        ),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(found: Mapping[str, TensorHeader], why: str) -> None:
    assert misfit(found, tensors(), CONFIG) == why


@pytest.mark.parametrize(
    ("found", "expected", "config"),
    [
        (tensors(), tensors(), CONFIG),
        (tensors(lm_head__weight=("F32", (8, 4))), tensors(), CONFIG),
        (tensors(lm_head__weight=None), tensors(), CONFIG | {"tie_word_embeddings": True}),
        (tensors(), tensors(lm_head__weight=None), CONFIG | {"tie_word_embeddings": True}),
        (tensors(lm_head__weight=None), tensors(), {}),
        (tensors(), tensors(model__layers__2__mlp__weight=("BF16", (4, 4))), CONFIG),
        (tensors(), tensors(mtp__fc__weight=("BF16", (4, 4))), CONFIG),
        (tensors(), tensors(model__visual__blocks__0__weight=("BF16", (4, 4))), CONFIG),
        (
            tensors(),
            tensors(model__embed_tokens__weight=None, model__language_model__embed_tokens__weight=("BF16", (8, 4))),
            CONFIG,
        ),
    ],
    ids=[
        "the same",
        "another precision",
        "a tied head is left out",
        "a tied head is spelt out",
        "a head that may be tied",
        "a layer that predicts later tokens",
        "heads that predict later tokens",
        "another medium",
        "a text model of several media",
    ],
)
def test_a_checkpoint_of_the_model_fits(
    found: Mapping[str, TensorHeader], expected: Mapping[str, TensorHeader], config: Mapping[str, object]
) -> None:
    assert misfit(found, expected, config) is None
