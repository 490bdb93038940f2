"""How much memory the logits of a model's head take, and what is computed from them, forward and backward."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clawstream.training.model import Model
from clawstream.training.step.losses import Suffix

VOCABULARY = 1001  # no other side of the models is as long, and two processes hold uneven halves
HEAD_ROWS = 50  # places whose logits may be computed at once: more than the models are wide, for a head's gradient


def suffixes(num_answers: int) -> list[Suffix]:
    """Return answers of a hundred tokens."""
    return [Suffix([n + 1] * 3, [(n + 7 * t) % VOCABULARY for t in range(100)], 0.9) for n in range(num_answers)]


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors of numbers for each token of the vocabulary: the largest, and the most that lived at once."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary = vocabulary
        self._live_bytes = 0
        self.largest_bytes = 0
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute it as it would be; what is another view of an argument is no new tensor."""
        found = func(*args, **kwargs or {})
        given = {id(one.untyped_storage()) for one in _tensors((args, kwargs))}
        for one in _tensors(found):
            storage = one.untyped_storage()
            if one.ndim > 1 and one.shape[-1] == self._vocabulary and id(storage) not in given:
                self.largest_bytes = max(self.largest_bytes, storage.nbytes())
                self._live_bytes += storage.nbytes()
                self.most_bytes = max(self.most_bytes, self._live_bytes)
                weakref.finalize(storage, self._let_go, storage.nbytes())
        return found

    def _let_go(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes


def held(model: Model, answers: Sequence[Suffix], vocabulary: int) -> tuple[int, int]:
    """Return both while answers are scored, and learned from with the likeliest tokens."""
    with _Held(vocabulary) as found:
        tops = model.likeliest(answers, num_tokens=5, weights=None, budget_tokens=10**6)
        model.score(answers, weights=None, budget_tokens=10**6)

        def total_of(group: Sequence[int]) -> torch.Tensor:
            scores = model.token_scores([answers[i] for i in group], [tops[i].ids_TK for i in group])
            return scores.logp_BT.nansum() + scores.among_BTK.nansum()

        model.accumulate([range(len(answers))], answers, total_of)
    return found.largest_bytes, found.most_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
