"""The Tinker SDK's surface over a model in this process: what the trainer and the engine call of it, and its errors.

It computes with our torch model, so that a test compares the service's trainer with the local one number by number. The
same checks run against a real server by the real SDK in tests/system/tinker/test_service.py. Scores are at temperature
1, also of answers that were sampled at another, as SkyRL's server tells them.
"""

import importlib.machinery
import sys
import types as python
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from clawstream.training.gating import write
from clawstream.training.step.losses import Suffix
from clawstream.training.torch_model import TorchModel

T = TypeVar("T")


class TinkerError(Exception):
    """The SDK's own root."""


class APIConnectionError(TinkerError):
    """The service can't be reached."""


class APIStatusError(TinkerError):
    """The service answered with an error."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class FakeTinker:
    """A service with one base; `fails` is raised by each call while it is set."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.saved: dict[str, Any] = {}
        self.fails: Exception | None = None
        self.calls: list[str] = []
        self.forget_values = 0  # log-probs that are left out of each answer
        self.refuses: list[Exception] = []  # what the next calls of `forward` are answered with
        self.flows = Event()  # while it is not set, answers and the opening of sessions do not come
        self.flows.set()
        self.wraps = False  # clients come as futures, as from newer SDKs
        self.sampled: list[Any] = []  # the parameters of each answer that was asked for
        self.started = 0  # how often it was: sessions and clients of an earlier start are not known any more
        self.drift = 0.0  # added to every weight by a step, as no service takes a step twice to the same bits

    def done(self, what: str, value: T, *, since: int | None = None) -> "Future[T]":
        """Return a future of the value, or of the failure that a client of that start has now."""
        self.calls.append(what)
        future: Future[T] = Future()
        if not self.flows.is_set():
            return future
        try:
            self.refuse(since)
        except (TinkerError, OSError) as failure:
            future.set_exception(failure)
        else:
            future.set_result(value)
        return future

    def made(self, client: T) -> "T | Future[T]":
        """Return a client as the SDK does."""
        if not self.wraps:
            return client
        future: Future[T] = Future()
        future.set_result(client)
        return future

    def knows(self, since: int) -> bool:
        """Whether a client of that start would get an answer now."""
        return self.fails is None and since == self.started

    def refuse(self, since: int | None = None) -> None:
        """Raise the present failure, if any; so does a client of an earlier start."""
        if self.fails is not None:
            raise self.fails
        if since not in (None, self.started):
            raise APIStatusError("no such session", 404)


class ServiceClient:
    """The SDK's entry."""

    fake: FakeTinker

    def __init__(self, *, base_url: str | None, api_key: str) -> None:
        assert api_key.startswith("tml-"), "the SDK refuses any other key"
        self.base_url = base_url
        self.fake.flows.wait(timeout=60)
        self.fake.refuse()
        self._since = self.fake.started

    def get_server_capabilities(self) -> object:
        self.fake.refuse(self._since)
        return SimpleNamespace(supported_models=[])

    def create_lora_training_client(self, *, base_model: str, rank: int, seed: int) -> object:
        assert base_model == str(self.fake.base)
        self.fake.refuse(self._since)
        model = TorchModel.load(self.fake.base, lora_rank=rank, seed=seed)
        return self.fake.made(TrainingClient(self.fake, model, rank))

    def create_training_client_from_state_with_optimizer(self, path: str) -> object:
        self.fake.refuse(self._since)
        if path not in self.fake.saved:
            raise APIStatusError("no such checkpoint", 404)
        rank, weights, optimizer = self.fake.saved[path]
        client = TrainingClient(self.fake, TorchModel.load(self.fake.base, lora_rank=rank, seed=0), rank)
        client.model.put(weights)
        client.optimizer.load_state_dict(deepcopy(optimizer))
        return self.fake.made(client)

    def create_sampling_client(self, *, model_path: str | None = None, base_model: str | None = None) -> object:
        self.fake.refuse(self._since)
        if model_path is None:
            assert base_model == str(self.fake.base)
            return self.fake.made(SamplingClient(self.fake, TorchModel.load(self.fake.base)))
        if model_path not in self.fake.saved:
            raise APIStatusError("no such checkpoint", 404)
        rank, weights, _ = self.fake.saved[model_path]
        model = TorchModel.load(self.fake.base, lora_rank=rank, seed=0)
        model.put(weights)
        return self.fake.made(SamplingClient(self.fake, model))


class TrainingClient:
    """An adapter in training."""

    def __init__(self, fake: FakeTinker, model: TorchModel, rank: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(list(model.trained.values()))
        self._fake, self._rank = fake, rank

    def forward(self, data: Sequence[Any], loss_fn: str) -> "Future[object]":
        assert loss_fn == "cross_entropy"
        if self._fake.refuses:
            refused: Future[object] = Future()
            refused.set_exception(self._fake.refuses.pop(0))
            return refused
        with torch.no_grad():
            logps = [self._logp(one) for one in data]
        return self._fake.done("forward", self._outputs(logps))

    def forward_backward(self, data: Sequence[Any], loss_fn: str, loss_fn_config: dict[str, float]) -> "Future[object]":
        assert loss_fn == "ppo"
        assert data, "the SDK refuses a step on nothing"
        logps = []
        for one in data if self._fake.fails is None else ():
            logp_T = self._logp(one)
            given_T, wanted_T = (torch.tensor(one.loss_fn_inputs[name]) for name in ("logprobs", "advantages"))
            ratio_T = (logp_T - given_T).exp()
            low, high = loss_fn_config["clip_low_threshold"], loss_fn_config["clip_high_threshold"]
            loss = -torch.minimum(ratio_T * wanted_T, ratio_T.clamp(low, high) * wanted_T).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            logps.append(logp_T.detach())
        return self._fake.done("forward_backward", self._outputs(logps))

    def optim_step(self, params: Any) -> "Future[object]":
        if self._fake.fails is not None:
            return self._fake.done("optim_step", None)
        norm = self.model.clip(params.grad_clip_norm)
        for group in self.optimizer.param_groups:
            group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps}
            group["weight_decay"] = params.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.put({name: value + self._fake.drift for name, value in self.model.copy().items()})
        return self._fake.done("optim_step", SimpleNamespace(metrics={"skyrl.ai/grad_norm": norm}))

    def save_weights_for_sampler(self, *, name: str) -> "Future[Any]":
        return self._save(f"tinker://m/sampler_weights/{name}")

    def save_state(self, *, name: str) -> "Future[Any]":
        return self._save(f"tinker://m/weights/{name}")

    def _save(self, path: str) -> "Future[Any]":
        if self._fake.fails is None:
            assert path not in self._fake.saved, "the service keeps the first of two by one name"
            self._fake.saved[path] = (self._rank, self.model.copy(), deepcopy(self.optimizer.state_dict()))
        return self._fake.done("save", SimpleNamespace(path=path))

    def _logp(self, datum: Any) -> Tensor:
        targets = datum.loss_fn_inputs["target_tokens"]
        assert all(len(numbers) == len(targets) for numbers in datum.loss_fn_inputs.values())
        assert datum.model_input.ids[1:] == targets[:-1]
        suffix = Suffix((datum.model_input.ids[0],), tuple(targets), 1.0)
        return self.model.token_scores([suffix]).logp_BT[0]

    def _outputs(self, logps: Sequence[Tensor]) -> object:
        kept = [logp_T.tolist()[self._fake.forget_values :] for logp_T in logps]
        return SimpleNamespace(loss_fn_outputs=[{"logprobs": SimpleNamespace(data=values)} for values in kept])


class SamplingClient:
    """A snapshot."""

    def __init__(self, fake: FakeTinker, model: TorchModel) -> None:
        self._fake, self._model = fake, model
        self._since = fake.started

    def sample(self, *, prompt: Any, num_samples: int, sampling_params: Any) -> "Future[object]":
        assert num_samples == 1
        self._fake.sampled.append(sampling_params)
        if not self._fake.flows.is_set() or not self._fake.knows(self._since):
            return self._fake.done("sample", None, since=self._since)
        question = Suffix(tuple(prompt.ids), (0,), sampling_params.temperature)
        tokens = self._drawn(question, sampling_params)
        values = self._scored((*prompt.ids, *tokens), len(tokens))
        sequence = SimpleNamespace(tokens=tokens, logprobs=values, stop_reason="stop")
        return self._fake.done("sample", SimpleNamespace(sequences=[sequence]))

    def _drawn(self, question: Suffix, params: Any) -> list[int]:
        drawn: list[int] = []
        seed = 0 if params.seed is None else params.seed
        for place in range(params.max_tokens):
            here = question._replace(prompt_ids=(*question.prompt_ids, *drawn))
            if params.temperature == 0:
                top = self._model.likeliest([here], num_tokens=1, weights=None, budget_tokens=4096)[0]
                drawn.append(int(top.ids_TK[0, 0]))
            else:
                found = write(self._model, [here], limit_tokens=1, seed=seed + place)
                assert found is not None
                drawn.append(found[0].token_ids[0])
            if drawn[-1] in (params.stop or ()):
                break
        return drawn

    def compute_logprobs(self, prompt: Any) -> "Future[list[float | None]]":
        if not self._fake.knows(self._since):
            return self._fake.done("compute_logprobs", [], since=self._since)
        values = self._scored(tuple(prompt.ids), len(prompt.ids) - 1)
        return self._fake.done("compute_logprobs", [None, *values][self._fake.forget_values :])

    def _scored(self, ids: tuple[int, ...], num_last: int) -> list[float]:
        if not num_last:
            return []
        suffix = Suffix(ids[: len(ids) - num_last], ids[len(ids) - num_last :], 1.0)
        found: list[float] = self._model.score([suffix], weights=None, budget_tokens=4096)[0].tolist()
        return found


class _ModelInput:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    @classmethod
    def from_ints(cls, ids: list[int]) -> "_ModelInput":
        return cls(ids)


def _sampling(
    *, max_tokens: int, temperature: float, seed: int | None = None, stop: list[int] | None = None, top_p: float = 1.0,
    top_k: int = -1,
) -> SimpleNamespace:  # fmt: skip
    return SimpleNamespace(
        max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop, top_p=top_p, top_k=top_k
    )


def _record(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**fields)


@contextmanager
def in_place_of_the_sdk(base: Path) -> Iterator[FakeTinker]:
    """Have `import tinker` find this module's service with that base, during the block."""
    fake, before = FakeTinker(base), {name: sys.modules.get(name) for name in ("tinker", "tinker.types")}
    sdk: Any = python.ModuleType("tinker")
    sdk.__spec__ = importlib.machinery.ModuleSpec("tinker", None)
    sdk.ServiceClient = type("ServiceClient", (ServiceClient,), {"fake": fake})
    sdk.TinkerError, sdk.APIConnectionError, sdk.APIStatusError = TinkerError, APIConnectionError, APIStatusError
    sdk.types = SimpleNamespace(ModelInput=_ModelInput, Datum=_record, AdamParams=_record, SamplingParams=_sampling)
    sys.modules["tinker"] = sdk
    try:
        yield fake
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
